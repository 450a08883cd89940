// Where a rank's signal words are. Words that ranks update through mapped memory are in the near part of its heap.
// Words that a NIC updates, or that this rank's host stores as totals (P18), are in the far part.
#pragma once

#include "wire/rank_mask.h"
#include "wire/signals.h"

namespace deep_ep::wire {

struct FarWords {
    u64 distance;      // from a word's address in the near part to its address in the far part; modulo 2^64
    RankMask sources;  // sources whose words are in the far part

    // `in_near`: the word's address in the near part. Words of row streams are always there: ranks of a node write them
    // by loads and stores, regardless of how the rank with the row stream's number is reached.
    const u64* place(const u8* in_near, u32 kind, u32 source) const {
        // Branch-free: with a branch a kernel would load the distance only after it has the bit, and then the word.
        const u64 bit = kind < kOfRanks ? sources.words[source / RankMask::kBits] >> source % RankMask::kBits & 1 : 0;
        return reinterpret_cast<const u64*>(reinterpret_cast<u64>(in_near) + (distance & (0 - bit)));
    }
};

}  // namespace deep_ep::wire
