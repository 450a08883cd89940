// Where a rank's signal words are: in its heap, where their writers reach them by loads and stores or through the
// atomics of a NIC. The words of ranks whose puts are reported by this rank's host, as totals (P18), are in host memory
// instead: only the host writes them, and its stores to GPU memory are expensive.
#pragma once

#include "wire/rank_mask.h"
#include "wire/signals.h"

namespace deep_ep::wire {

struct HostWords {
    u64 distance;      // from a word's address in the heap to its address in host memory; modulo 2^64
    RankMask sources;  // sources whose words are in host memory

    // `in_heap`: the word's address in the heap. Words of row streams are always in the heap: ranks of a node write
    // them by loads and stores, regardless of how the rank with the row stream's number is reached.
    const u64* place(const u8* in_heap, u32 kind, u32 source) const {
        // Branch-free: with a branch a kernel would load the distance only after it has the bit, and then the word.
        const u64 bit = kind < kOfRanks ? sources.words[source / RankMask::kBits] >> source % RankMask::kBits & 1 : 0;
        return reinterpret_cast<const u64*>(reinterpret_cast<u64>(in_heap) + (distance & (0 - bit)));
    }
};

}  // namespace deep_ep::wire
