// A warp's operations on whole rows in global memory, this GPU's or a peer's, with 16 bytes per lane and access.
#pragma once

#include "device/bf16.h"
#include "device/cuda/qualifiers.h"
#include "device/cuda/warp.h"
#include "wire/types.h"

namespace deep_ep::device {

namespace detail {

constexpr u32 kPieceBytes = 16;
// Loads in flight per lane before their values are used.
constexpr u32 kBatch = 4;
// Rows whose pieces a lane has in flight while it sums: all rows of a token that went to at most this many ranks.
constexpr u32 kMaxSummed = 8;
// For up to this many ranks the next pieces are loaded before the last ones are summed; for more there are not enough
// registers.
constexpr u32 kMaxSummedAhead = 6;

// Eight bfloat16.
struct Piece {
    u32 words[4];
};

// Rows are read only once, so they need no place in L1. It is not ld.global.nc, since a peer may have written them
// during this kernel.
DEEP_EP_DEVICE Piece load_piece(const void* row, u32 i) {
    Piece piece;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.words[0]), "=r"(piece.words[1]), "=r"(piece.words[2]), "=r"(piece.words[3])
                 : "l"(static_cast<const Piece*>(row) + i)
                 : "memory");
    return piece;
}

DEEP_EP_DEVICE void store_piece(void* row, u32 i, const Piece& piece) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(static_cast<Piece*>(row) + i), "r"(piece.words[0]),
                 "r"(piece.words[1]), "r"(piece.words[2]), "r"(piece.words[3])
                 : "memory");
}

// The lane's share of a row of `count` pieces: reads a batch, then calls store(i, piece) for each piece of it.
template <class Store>
DEEP_EP_DEVICE void read_pieces(const void* src, u32 count, Store store) {
    u32 i = lane();
    for (; i + (kBatch - 1) * kWarpSize < count; i += kBatch * kWarpSize) {
        Piece pieces[kBatch];
#pragma unroll
        for (u32 b = 0; b < kBatch; ++b) pieces[b] = load_piece(src, i + b * kWarpSize);
#pragma unroll
        for (u32 b = 0; b < kBatch; ++b) store(i + b * kWarpSize, pieces[b]);
    }
    for (; i < count; i += kWarpSize) store(i, load_piece(src, i));
}

struct PieceSum {
    float elements[8];

    DEEP_EP_DEVICE void add(const Piece& piece) {
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {
            elements[2 * w] += bits_float(piece.words[w] << 16);
            elements[2 * w + 1] += bits_float(piece.words[w] & 0xffff0000u);
        }
    }
    // Not contracted to a fused multiply-add, which would round only once: CPUs may not have one.
    DEEP_EP_DEVICE void add(const Piece& piece, float weight) {
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {
            const float low = bits_float(piece.words[w] << 16), high = bits_float(piece.words[w] & 0xffff0000u);
            elements[2 * w] = __fadd_rn(elements[2 * w], __fmul_rn(weight, low));
            elements[2 * w + 1] = __fadd_rn(elements[2 * w + 1], __fmul_rn(weight, high));
        }
    }
    DEEP_EP_DEVICE Piece rounded() const {
        Piece piece;
#pragma unroll
        for (u32 w = 0; w < 4;
             ++w) {  // same function as float_to_bf16, for two values; the first operand becomes the upper half
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
                : "=r"(piece.words[w])
                : "f"(elements[2 * w + 1]), "f"(elements[2 * w]));
        }
        return piece;
    }
};

}  // namespace detail

DEEP_EP_DEVICE void warp_copy(void* dst, const void* src, u64 bytes) {
    detail::read_pieces(src, static_cast<u32>(bytes / detail::kPieceBytes),
                        [&](u32 i, const detail::Piece& piece) { detail::store_piece(dst, i, piece); });
}

// `streaming` is for CPUs: a GPU's stores bypass L1 anyway.
DEEP_EP_DEVICE void warp_copy_to_many(u8* const* dst, u32 n, const void* src, u64 bytes, bool) {
    detail::read_pieces(src, static_cast<u32>(bytes / detail::kPieceBytes), [&](u32 i, const detail::Piece& piece) {
        for (u32 k = 0; k < n; ++k) detail::store_piece(dst[k], i, piece);
    });
}

namespace detail {

// Sums the rows of kSources sources, with as many pieces in flight at any time as a lane has registers for: those of
// its next kSteps steps. A lane that waited for each step's loads before it issued the next ones would leave the link
// idle while it sums and stores. kSources is a constant, so that no step branches on it.
template <u32 kSources>
DEEP_EP_DEVICE void sum_ahead(void* dst, const u8* const* src, const void* bias0, const void* bias1, u32 count) {
    constexpr u32 kSteps = kMaxSummed / kSources;
    static_assert(kSteps >= 1 && kSources <= kMaxSummedAhead, "the pieces of a step must fit");
    Piece pieces[kSteps][kSources];
    const auto load_step = [&](Piece(&step)[kSources], u32 i) {
        if (i >= count) return;
#pragma unroll
        for (u32 k = 0; k < kSources; ++k) step[k] = load_piece(src[k], i);
    };
#pragma unroll
    for (u32 s = 0; s < kSteps; ++s) load_step(pieces[s], lane() + s * kWarpSize);
#pragma unroll 1
    for (u32 first = lane(); first < count; first += kSteps * kWarpSize) {
#pragma unroll
        for (u32 s = 0; s < kSteps; ++s) {
            const u32 i = first + s * kWarpSize;
            if (i >= count) return;
            PieceSum sum{};
#pragma unroll
            for (u32 k = 0; k < kSources; ++k) sum.add(pieces[s][k]);
            load_step(pieces[s], i + kSteps * kWarpSize);
            if (bias0 != nullptr) sum.add(load_piece(bias0, i));
            if (bias1 != nullptr) sum.add(load_piece(bias1, i));
            store_piece(dst, i, sum.rounded());
        }
    }
}

// Sums rows of any number of sources: the pieces of a step are loaded in batches.
DEEP_EP_DEVICE void sum_in_batches(void* dst, const u8* const* src, u32 n, const void* bias0, const void* bias1,
                                   u32 count) {
    for (u32 i = lane(); i < count; i += kWarpSize) {
        PieceSum sum{};
        for (u32 k = 0; k < n; k += kMaxSummed) {
            Piece pieces[kMaxSummed];
#pragma unroll
            for (u32 b = 0; b < kMaxSummed; ++b) {
                if (k + b < n) pieces[b] = load_piece(src[k + b], i);
            }
#pragma unroll
            for (u32 b = 0; b < kMaxSummed; ++b) {
                if (k + b < n) sum.add(pieces[b]);
            }
        }
        if (bias0 != nullptr) sum.add(load_piece(bias0, i));
        if (bias1 != nullptr) sum.add(load_piece(bias1, i));
        store_piece(dst, i, sum.rounded());
    }
}

}  // namespace detail

DEEP_EP_DEVICE void warp_sum_bf16(void* dst, const u8* const* src, u32 n, const void* bias0, const void* bias1,
                                  u64 elements) {
    using detail::kMaxSummed;
    const u32 count = static_cast<u32>(elements * sizeof(u16) / detail::kPieceBytes);
    // A row of one step leaves nothing to load ahead.
    if (count <= kWarpSize) return detail::sum_in_batches(dst, src, n, bias0, bias1, count);
    switch (n) {
        case 1:
            return detail::sum_ahead<1>(dst, src, bias0, bias1, count);
        case 2:
            return detail::sum_ahead<2>(dst, src, bias0, bias1, count);
        case 3:
            return detail::sum_ahead<3>(dst, src, bias0, bias1, count);
        case 4:
            return detail::sum_ahead<4>(dst, src, bias0, bias1, count);
        case 5:
            return detail::sum_ahead<5>(dst, src, bias0, bias1, count);
        case 6:
            return detail::sum_ahead<6>(dst, src, bias0, bias1, count);
        default:
            return detail::sum_in_batches(dst, src, n, bias0, bias1, count);
    }
}

DEEP_EP_DEVICE void warp_weighted_sum_bf16(void* dst, const u8* const* src, const float* weights, u32 n, u64 elements) {
    using detail::kMaxSummed, detail::Piece;
    const u32 count = static_cast<u32>(elements * sizeof(u16) / detail::kPieceBytes);
    for (u32 i = lane(); i < count; i += kWarpSize) {
        detail::PieceSum sum{};
        for (u32 k = 0; k < n; k += kMaxSummed) {
            Piece pieces[kMaxSummed];
#pragma unroll
            for (u32 b = 0; b < kMaxSummed; ++b) {
                if (k + b < n) pieces[b] = detail::load_piece(src[k + b], i);
            }
#pragma unroll
            for (u32 b = 0; b < kMaxSummed; ++b) {
                if (k + b < n) sum.add(pieces[b], weights[k + b]);
            }
        }
        detail::store_piece(dst, i, sum.rounded());
    }
}

}  // namespace deep_ep::device
