// What a warp does to whole rows in global memory, this GPU's or a peer's, 16 bytes per lane and access.
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
// Rows whose pieces a lane has in flight while it sums: a token's, wherever it has gone to no more ranks than these.
constexpr u32 kMostSummed = 8;

// Eight bfloat16.
struct Piece {
    u32 words[4];
};

// Rows are read once, so they need no place in L1. Not ld.global.nc: a peer may have written them during this kernel.
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

// The lane's share of a row of `count` pieces: reads a batch, then calls store(i, piece) for each of it.
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
    DEEP_EP_DEVICE Piece rounded() const {
        Piece piece;
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {  // the same function as float_to_bf16, two at once; the first operand goes up
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

DEEP_EP_DEVICE void warp_sum_bf16(void* dst, const u8* const* src, u32 n, const void* bias0, const void* bias1,
                                  u64 elements) {
    using detail::kMostSummed;
    using detail::Piece;
    const u32 count = static_cast<u32>(elements * sizeof(u16) / detail::kPieceBytes);
    for (u32 i = lane(); i < count; i += kWarpSize) {
        detail::PieceSum sum{};
        for (u32 k = 0; k < n; k += kMostSummed) {
            Piece pieces[kMostSummed];
#pragma unroll
            for (u32 b = 0; b < kMostSummed; ++b) {
                if (k + b < n) pieces[b] = detail::load_piece(src[k + b], i);
            }
#pragma unroll
            for (u32 b = 0; b < kMostSummed; ++b) {
                if (k + b < n) sum.add(pieces[b]);
            }
        }
        if (bias0 != nullptr) sum.add(detail::load_piece(bias0, i));
        if (bias1 != nullptr) sum.add(detail::load_piece(bias1, i));
        detail::store_piece(dst, i, sum.rounded());
    }
}

}  // namespace deep_ep::device
