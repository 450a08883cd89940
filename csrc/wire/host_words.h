// Where a rank's signal words lie: in its heap, where their writers reach them, by loads and stores or through a NIC
// that adds. Words of ranks whose puts this rank's host tells of, by totals (P18), lie in the host's memory instead: a
// host cannot store into a GPU's cheaply, and it alone writes these.
#pragma once

#include "wire/rank_mask.h"
#include "wire/signals.h"

namespace deep_ep::wire {

struct HostWords {
    u64 distance;      // from a word's address in the heap to that of the host's; modulo 2^64
    RankMask sources;  // whose words are the host's

    // `in_heap`: the word's address there. Ranks of a node write the words of streams by loads and stores, whatever
    // reaches the rank that has a stream's number.
    const u64* place(const u8* in_heap, u32 kind, u32 source) const {
        // No branch: behind one a kernel would load the distance only when it has the bit, and the word after both.
        const u64 bit = kind < kOfRanks ? sources.words[source / RankMask::kBits] >> source % RankMask::kBits & 1 : 0;
        return reinterpret_cast<const u64*>(reinterpret_cast<u64>(in_heap) + (distance & (0 - bit)));
    }
};

}  // namespace deep_ep::wire
