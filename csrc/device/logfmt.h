// LogFMT-10: 128 bfloat16 values in 160 bytes, each as a sign and nine bits of a logarithm. It uses only integer
// arithmetic, so that all targets give the same bits.
//
// The logarithm is that of the float format itself: the bits of a magnitude, read as an integer, grow by 128 from one
// power of two to the next, and are linear in between. Codes 1 to 511 divide the range from the smallest to the largest
// magnitude of a group evenly, in steps of at least one bfloat16; code 0 is zero. Therefore a group whose magnitudes
// are within 510 steps of bfloat16, almost four powers of two, is restored bit by bit. In other groups a normal value
// is off by at most about half a step: 1 / 1000 of itself for each power of two between the smallest and the largest.
// Values more than 32 powers of two below the largest become zero, so that the others are off by at most 3.2 %. Signs
// are kept, including those of zeros.
//
// As in DeepEP, a group that has a magnitude of 1 or more stays bfloat16, so that errors are small in absolute terms,
// too. Infinities and NaNs count as such magnitudes.
//
// A row consists of a head and a rest, stored separately: the head has the part that every group has, and the rest has
// the remainder of the groups that stay bfloat16. Therefore a message whose groups are all cast needs no rests.
//
//   head   u32[groups] words of the groups (LogGroup), aligned to 16 bytes | 160 bytes for each group
//   rest   96 bytes for each group
//
// For a group's 16 pieces of eight elements each (LogPiece), the head has u64[16], then u16[16]; the rest has u32[16],
// then u16[16].
#pragma once

#include "device/anywhere.h"
#include "device/bf16.h"

namespace deep_ep {

constexpr u32 kLogGroup = 128;
constexpr u32 kLogPiece = 8;  // elements
constexpr u32 kLogPieces = kLogGroup / kLogPiece;
constexpr u32 kLogHeadBytes = kLogPieces * (sizeof(u64) + sizeof(u16));
constexpr u32 kLogRestBytes = kLogPieces * (sizeof(u32) + sizeof(u16));
static_assert(kLogHeadBytes + kLogRestBytes == kLogGroup * sizeof(u16),
              "head and rest must add up to a group of bfloat16");

// Sizes of a row's head and rest.
constexpr u32 log_words_bytes(u32 elements) {
    return (elements / kLogGroup * static_cast<u32>(sizeof(u32)) + 15) / 16 * 16;
}
constexpr u32 log_row_bytes(u32 elements) { return log_words_bytes(elements) + elements / kLogGroup * kLogHeadBytes; }
constexpr u32 log_rest_bytes(u32 elements) { return elements / kLogGroup * kLogRestBytes; }

// The range of a group's magnitudes, as bits of bfloat16.
struct LogGroup {
    static constexpr u32 kOne = 0x3f80, kMaxSpan = 32u << 7, kCodes = 511, kFraction = 20;

    u32 most;
    u32 least;  // smallest with a code of its own; above all magnitudes if all are zero

    DEEP_EP_ANYWHERE static LogGroup of_word(u32 word) { return {word & 0xffffu, word >> 16}; }
    // Start with none(), add() every element; bounded() is then the group.
    DEEP_EP_ANYWHERE static LogGroup none() { return {0, kOne}; }
    DEEP_EP_ANYWHERE void add(u32 element) {
        const u32 magnitude = element & 0x7fffu;  // has the order of its bits, NaNs last
        most = magnitude > most ? magnitude : most;
        least = magnitude != 0 && magnitude < least ? magnitude : least;
    }
    DEEP_EP_ANYWHERE LogGroup bounded() const { return {most, most > least + kMaxSpan ? most - kMaxSpan : least}; }
    DEEP_EP_ANYWHERE u32 word() const { return most | least << 16; }
    DEEP_EP_ANYWHERE bool is_cast() const { return most < kOne; }

    DEEP_EP_ANYWHERE u32 span() const { return most > least + (kCodes - 1) ? most - least : kCodes - 1; }
    // Distance between consecutive codes, as bits of an fp32.
    DEEP_EP_ANYWHERE u32 step() const { return ((span() << 16) + (kCodes - 1) / 2) / (kCodes - 1); }
    // The reciprocal: codes per step of a magnitude, as a fixed-point fraction.
    DEEP_EP_ANYWHERE u32 rate() const { return ((kCodes - 1) << kFraction) / span(); }
    // Code of a magnitude. `rate` is the group's.
    DEEP_EP_ANYWHERE u32 code(u32 magnitude, u32 rate) const {
        const u32 nearest = ((magnitude - least) * rate + (1u << (kFraction - 1))) >> kFraction;
        return magnitude < least ? 0 : nearest + 1;
    }
    // Magnitude of a code. `step` is the group's.
    DEEP_EP_ANYWHERE u32 magnitude(u32 code, u32 step) const {
        return code == 0 ? 0 : (least << 16) + (code - 1) * step;
    }
};

// Eight elements: their codes, or the first five elements unchanged.
struct LogPiece {
    u64 low;  // bits 0 to 7 of each code; or elements 0 to 3
    u32 top;  // bit 8 of each code, then each sign; or element 4

    DEEP_EP_ANYWHERE static LogPiece of(const u32 (&words)[4], const LogGroup& group, u32 rate) {
        LogPiece piece{};
        for (u32 e = 0; e < kLogPiece; ++e) {
            const u32 element = words[e / 2] >> 16 * (e % 2), code = group.code(element & 0x7fffu, rate);
            piece.low |= static_cast<u64>(code & 0xffu) << 8 * e;
            piece.top |= (code >> 8) << e | (element >> 15 & 1u) << (8 + e);
        }
        return piece;
    }
    DEEP_EP_ANYWHERE float decoded(u32 e, const LogGroup& group, u32 step) const {
        const u32 code = (static_cast<u32>(low >> 8 * e) & 0xffu) | (top >> e & 1u) << 8;
        return bits_float(group.magnitude(code, step) | (top >> (8 + e) & 1u) << 31);
    }
};

// Where the heads and the rests of several rows are, each contiguous.
struct LogRows {
    const u8* heads;
    const u8* rests;
    u32 head_bytes, rest_bytes;

    DEEP_EP_ANYWHERE const u8* rest_of(const u8* head) const {
        const u32 row = static_cast<u32>((head - heads) / 16) / (head_bytes / 16);  // a 32-bit division is faster
        return rests + static_cast<u64>(row) * rest_bytes;
    }
};

}  // namespace deep_ep
