// When what connects two ranks is closed: once either has masked the other (P17). From then on nothing that is still on
// its way may arrive: the other end may wait for other things in the same place. A NIC on the bus does so when its host
// puts the queue pair into an error, and says when it has stopped. These look at the words that kernels poll.
#pragma once

#include "wire/rank_mask.h"
#include "wire/types.h"

namespace deep_ep::nic {

struct Closing {
    // In either end's heap, the word with the other's bit; null: never closed.
    u64* here = nullptr;
    u64* there = nullptr;
    u32 rank = 0;
    u32 peer = 0;

    // Acquire: as kernels load these words.
    bool closed() const {
        const auto has = [](const u64* word, u32 bit) {
            return word != nullptr && (__atomic_load_n(word, __ATOMIC_ACQUIRE) >> bit % wire::RankMask::kBits & 1) != 0;
        };
        return has(here, peer) || has(there, rank);
    }
    // Something has been read here and placed there. Releases, into words that stay what they are: a host that masks
    // the other rank exchanges its own, and its kernels, which acquire what it has stored, may use these places again.
    void placed() const {
        for (u64* word : {here, there}) {
            if (word != nullptr) __atomic_fetch_add(word, 0, __ATOMIC_RELEASE);
        }
    }
};

}  // namespace deep_ep::nic
