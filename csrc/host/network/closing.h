// The connection between two ranks closes once either has masked the other (P17). From then on nothing that is still in
// flight may arrive, since the receiver may expect other data in the same place. A real NIC stops when its host moves
// the queue pair to the error state, and reports that it has stopped. The software NIC looks at the words that kernels
// poll.
#pragma once

#include "wire/rank_mask.h"
#include "wire/types.h"

namespace deep_ep::nic {

struct Closing {
    // In the heap of each end, the mask word that has the bit of the other end; null: never closed.
    u64* here = nullptr;
    u64* there = nullptr;
    u32 rank = 0;
    u32 peer = 0;

    // Acquire, like the loads of these words in kernels.
    bool closed() const {
        const auto has = [](const u64* word, u32 bit) {
            return word != nullptr && (__atomic_load_n(word, __ATOMIC_ACQUIRE) >> bit % wire::RankMask::kBits & 1) != 0;
        };
        return has(here, peer) || has(there, rank);
    }
    // Called after data has been read here and placed there. Releases these accesses by adding zero to both words: a
    // host that masks the other rank exchanges its own word, and its kernels, which acquire that value, may reuse the
    // memory.
    void placed() const {
        for (u64* word : {here, there}) {
            if (word != nullptr) __atomic_fetch_add(word, 0, __ATOMIC_RELEASE);
        }
    }
};

}  // namespace deep_ep::nic
