// The progress of a rank's peers, derived from their `free` words in its heap and from what their hosts announce.
#pragma once

#include "host/control/control_plane.h"
#include "host/heap/memory.h"
#include "wire/far_words.h"
#include "wire/heap_layout.h"

namespace deep_ep::host {

struct Progress {
    int rank;
    wire::HeapLayout heap;
    const uint8_t* near;  // the near part of this rank's heap
    wire::FarWords far_words;

    // The number of operations of a generation that a peer has finished, as far as known here (P4).
    uint64_t finished_by(Memory& memory, uint32_t generation, int peer) const {
        uint64_t uses = 0;
        for (u32 region = 0; region < heap.regions; ++region) {
            const uint64_t word =
                heap.bank_offset(generation) + heap.word_in_bank(region, wire::kFree, static_cast<u32>(peer));
            const u64* const place = far_words.place(near + word, wire::kFree, static_cast<u32>(peer));
            uses += memory.load_word(reinterpret_cast<const uint64_t*>(place));
        }
        return uses / wire::kUnit;
    }

    // Whether a peer is gone before finishing the operation that this rank is in, so that it never will; a peer that
    // has finished it may exit. `left`: considers a peer that has left, whose process need not have ended.
    bool is_lost(const ControlPlane& control, Memory& memory, uint32_t generation, int peer, bool left) const {
        const uint64_t own = control.announcement(rank);
        // Its words are read below, after its end: no later signal is possible.
        if (own == 0 || control.left(peer) != left) return false;
        // A peer that has left in between has closed its sockets, but its process lives, so no process is lost.
        if (!left && (!control.ended(peer) || control.left(peer))) return false;
        return finished_by(memory, generation, peer) <= wire::announced_operation(own);
    }
};

}  // namespace deep_ep::host
