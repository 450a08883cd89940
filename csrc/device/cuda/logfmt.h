// Rows of LogFMT, see device.h. A lane takes a piece of eight elements, and half a warp takes a group.
#pragma once

#include "device/cuda/copy.h"
#include "device/logfmt.h"

namespace deep_ep::device {

namespace detail {

// Rows whose pieces a lane has in flight while it sums: fewer than for bfloat16, since decoding takes registers too.
constexpr u32 kMaxDecoded = 4;

// Like load_piece(): the data is read once, and a peer may have written it during this kernel.
DEEP_EP_DEVICE u32 load_log_word(const u8* from) {
    u32 word;
    asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}
DEEP_EP_DEVICE u32 load_log_half(const u8* from) {
    u16 half;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(half) : "l"(from) : "memory");
    return half;
}
DEEP_EP_DEVICE LogPiece load_log_piece(const u8* head, u32 piece) {
    LogPiece loaded;
    asm volatile("ld.global.L1::no_allocate.b64 %0, [%1];"
                 : "=l"(loaded.low)
                 : "l"(head + piece * sizeof(u64))
                 : "memory");
    loaded.top = load_log_half(head + kLogPieces * sizeof(u64) + piece * sizeof(u16));
    return loaded;
}
DEEP_EP_DEVICE void store_log_piece(u8* head, u32 piece, const LogPiece& stored) {
    reinterpret_cast<u64*>(head)[piece] = stored.low;
    reinterpret_cast<u16*>(head + kLogPieces * sizeof(u64))[piece] = static_cast<u16>(stored.top);
}

// For a group that stays bfloat16: elements 0 to 4 in the head; 6, 7 and 5 in the rest.
DEEP_EP_DEVICE void store_kept(u8* head, u8* rest, u32 piece, const Piece& kept) {
    store_log_piece(head, piece, {kept.words[0] | static_cast<u64>(kept.words[1]) << 32, kept.words[2]});
    reinterpret_cast<u32*>(rest)[piece] = kept.words[3];
    reinterpret_cast<u16*>(rest + kLogPieces * sizeof(u32))[piece] = static_cast<u16>(kept.words[2] >> 16);
}
DEEP_EP_DEVICE Piece load_kept(const LogPiece& head, const u8* rest, u32 piece) {
    const u32 fifth = load_log_half(rest + kLogPieces * sizeof(u32) + piece * sizeof(u16));
    return {{static_cast<u32>(head.low), static_cast<u32>(head.low >> 32), head.top | fifth << 16,
             load_log_word(rest + piece * sizeof(u32))}};
}

// Half a warp: returns the group of its lanes' pieces.
DEEP_EP_DEVICE LogGroup log_group_of(const Piece& piece) {
    LogGroup group = LogGroup::none();
#pragma unroll
    for (u32 e = 0; e < kLogPiece; ++e) group.add(piece.words[e / 2] >> 16 * (e % 2));
#pragma unroll
    for (u32 step = kLogPieces / 2; step != 0; step /= 2) {
        group.most = max(group.most, __shfl_xor_sync(kFullMask, group.most, static_cast<int>(step)));
        group.least = min(group.least, __shfl_xor_sync(kFullMask, group.least, static_cast<int>(step)));
    }
    return group.bounded();
}

}  // namespace detail

DEEP_EP_DEVICE bool warp_cast_logfmt(u8* head, u8* rest, const void* src, u32 elements) {
    const u32 count = elements / kLogPiece;
    u8* const heads = head + log_words_bytes(elements);
    bool keeps = false;
    for (u32 first = 0; first < count; first += kWarpSize) {
        const u32 i = first + lane(), g = i / kLogPieces, p = i % kLogPieces;
        const bool mine = i < count;
        detail::Piece piece{};
        if (mine) piece = detail::load_piece(src, i);
        const LogGroup group = detail::log_group_of(piece);
        if (!mine) continue;
        if (p == 0) reinterpret_cast<u32*>(head)[g] = group.word();
        if (group.is_cast()) {
            detail::store_log_piece(heads + g * kLogHeadBytes, p, LogPiece::of(piece.words, group, group.rate()));
        } else {
            detail::store_kept(heads + g * kLogHeadBytes, rest + g * kLogRestBytes, p, piece);
            keeps = true;
        }
    }
    return keeps;
}

DEEP_EP_DEVICE void warp_weighted_sum_logfmt(void* dst, const u8* const* src, const float* weights, u32 n, u32 elements,
                                             const LogRows& rows) {
    using detail::kMaxDecoded;
    const u32 count = elements / kLogPiece, begin = log_words_bytes(elements);
    for (u32 i = lane(); i < count; i += kWarpSize) {
        const u32 g = i / kLogPieces, p = i % kLogPieces;
        detail::PieceSum sum{};
        for (u32 k = 0; k < n; k += kMaxDecoded) {
            LogPiece pieces[kMaxDecoded];
            u32 words[kMaxDecoded];
#pragma unroll
            for (u32 b = 0; b < kMaxDecoded; ++b) {
                if (k + b >= n) continue;
                words[b] = detail::load_log_word(src[k + b] + g * sizeof(u32));
                pieces[b] = detail::load_log_piece(src[k + b] + begin + g * kLogHeadBytes, p);
            }
#pragma unroll
            for (u32 b = 0; b < kMaxDecoded; ++b) {
                if (k + b >= n) continue;
                const LogGroup group = LogGroup::of_word(words[b]);
                const float weight = weights[k + b];
                if (!group.is_cast()) {
                    const u8* const rest = rows.rest_of(src[k + b]) + g * kLogRestBytes;
                    sum.add(detail::load_kept(pieces[b], rest, p), weight);
                    continue;
                }
                const u32 step = group.step();
#pragma unroll
                for (u32 e = 0; e < kLogPiece; ++e) {  // not contracted, like PieceSum::add
                    const float decoded = pieces[b].decoded(e, group, step);
                    sum.elements[e] = __fadd_rn(sum.elements[e], __fmul_rn(weight, decoded));
                }
            }
        }
        detail::store_piece(dst, i, sum.rounded());
    }
}

}  // namespace deep_ep::device
