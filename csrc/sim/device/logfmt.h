// Rows of LogFMT, see device.h.
#pragma once

#include "device/logfmt.h"
#include "sim/device/fp8_cast.h"

namespace deep_ep::device {

namespace detail {

// Eight elements, as the words of bfloat16 pairs.
struct LogWords {
    u32 words[kLogPiece / 2];
};

inline LogPiece load_log_piece(const u8* head, u32 piece) {
    LogPiece loaded{};
    u16 top;
    std::memcpy(&loaded.low, head + piece * sizeof(u64), sizeof(u64));
    std::memcpy(&top, head + kLogPieces * sizeof(u64) + piece * sizeof(u16), sizeof(u16));
    loaded.top = top;
    return loaded;
}
inline void store_log_piece(u8* head, u32 piece, const LogPiece& stored) {
    const u16 top = static_cast<u16>(stored.top);
    std::memcpy(head + piece * sizeof(u64), &stored.low, sizeof(u64));
    std::memcpy(head + kLogPieces * sizeof(u64) + piece * sizeof(u16), &top, sizeof(u16));
}

// For a group that stays bfloat16: elements 0 to 4 in the head; 6, 7 and 5 in the rest.
inline void store_kept(u8* head, u8* rest, u32 piece, const LogWords& kept) {
    store_log_piece(head, piece, {kept.words[0] | static_cast<u64>(kept.words[1]) << 32, kept.words[2]});
    const u16 fifth = static_cast<u16>(kept.words[2] >> 16);
    std::memcpy(rest + piece * sizeof(u32), &kept.words[3], sizeof(u32));
    std::memcpy(rest + kLogPieces * sizeof(u32) + piece * sizeof(u16), &fifth, sizeof(u16));
}
inline LogWords load_kept(const LogPiece& head, const u8* rest, u32 piece) {
    u32 last;
    u16 fifth;
    std::memcpy(&last, rest + piece * sizeof(u32), sizeof(u32));
    std::memcpy(&fifth, rest + kLogPieces * sizeof(u32) + piece * sizeof(u16), sizeof(u16));
    return {
        {static_cast<u32>(head.low), static_cast<u32>(head.low >> 32), head.top | static_cast<u32>(fifth) << 16, last}};
}

inline LogGroup log_group_of(const u16* elements) {
    LogGroup group = LogGroup::none();
    for (u32 i = 0; i < kLogGroup; ++i) group.add(elements[i]);
    return group.bounded();
}

// Adds weight times a group, decoded if it is cast.
inline void add_log_group(float (&sum)[kLogGroup], const LogGroup& group, const u8* head, const u8* rest,
                          float weight) {
    const u32 step = group.step();
    for (u32 p = 0; p < kLogPieces; ++p) {
        const LogPiece piece = load_log_piece(head, p);
        float* const to = sum + p * kLogPiece;
        if (group.is_cast()) {
            for (u32 e = 0; e < kLogPiece; ++e) to[e] += weight * piece.decoded(e, group, step);
        } else {
            const LogWords kept = load_kept(piece, rest, p);
            for (u32 e = 0; e < kLogPiece; ++e) {
                to[e] += weight * bf16_to_float(static_cast<u16>(kept.words[e / 2] >> 16 * (e % 2)));
            }
        }
    }
}

}  // namespace detail

inline bool warp_cast_logfmt(u8* head, u8* rest, const void* src, u32 elements) {
    const u32 groups = elements / kLogGroup;
    u8* const heads = head + log_words_bytes(elements);
    bool keeps = false;
    for (u32 g = detail::first_group(); g < groups; g += detail::kGroupStep) {
        const u16* const from = static_cast<const u16*>(src) + g * kLogGroup;
        const LogGroup group = detail::log_group_of(from);
        const u32 word = group.word(), rate = group.rate();
        std::memcpy(head + g * sizeof(u32), &word, sizeof(u32));
        keeps = keeps || !group.is_cast();
        for (u32 p = 0; p < kLogPieces; ++p) {
            detail::LogWords own;
            std::memcpy(&own, from + p * kLogPiece, sizeof(own));
            if (group.is_cast()) {
                detail::store_log_piece(heads + g * kLogHeadBytes, p, LogPiece::of(own.words, group, rate));
            } else {
                detail::store_kept(heads + g * kLogHeadBytes, rest + g * kLogRestBytes, p, own);
            }
        }
    }
    return keeps;
}

inline void warp_weighted_sum_logfmt(void* dst, const u8* const* src, const float* weights, u32 n, u32 elements,
                                     const LogRows& rows) {
    const u32 groups = elements / kLogGroup, begin = log_words_bytes(elements);
    for (u32 g = detail::first_group(); g < groups; g += detail::kGroupStep) {
        float sum[kLogGroup] = {};
        for (u32 k = 0; k < n; ++k) {
            u32 word;
            std::memcpy(&word, src[k] + g * sizeof(u32), sizeof(u32));
            detail::add_log_group(sum, LogGroup::of_word(word), src[k] + begin + g * kLogHeadBytes,
                                  rows.rest_of(src[k]) + g * kLogRestBytes, weights[k]);
        }
        u16* const to = static_cast<u16*>(dst) + g * kLogGroup;
        for (u32 i = 0; i < kLogGroup; ++i) to[i] = float_to_bf16(sum[i]);
    }
}

}  // namespace deep_ep::device
