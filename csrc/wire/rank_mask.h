// A set of ranks, a bit each.
#pragma once

#include "wire/types.h"

namespace deep_ep::wire {

constexpr u32 kMaxRanks = 1024;

struct RankMask {
    static constexpr u32 kBits = 64;
    u64 words[kMaxRanks / kBits];

    constexpr bool has(u32 rank) const { return (words[rank / kBits] >> rank % kBits & 1) != 0; }
    constexpr void add(u32 rank) { words[rank / kBits] |= u64{1} << rank % kBits; }
    // The number of words that hold ranks below `ranks`; the other words are zero.
    static constexpr u32 used(u32 ranks) { return (ranks + kBits - 1) / kBits; }
    // The lowest rank in a nonzero word.
    static constexpr u32 lowest(u32 word, u64 bits) {
        u32 bit = 0;
        while ((bits >> bit & 1) == 0) ++bit;
        return word * kBits + bit;
    }
    // The lowest rank that is in exactly one of the two masks; kMaxRanks: they are equal.
    constexpr u32 first_difference(const RankMask& other) const {
        for (u32 word = 0; word < kMaxRanks / kBits; ++word) {
            if (words[word] != other.words[word]) return lowest(word, words[word] ^ other.words[word]);
        }
        return kMaxRanks;
    }
};
static_assert(sizeof(RankMask) == kMaxRanks / 8, "a bit for each rank");

}  // namespace deep_ep::wire
