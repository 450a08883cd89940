// A warp that serves many entries which other ranks hold up, and blocks on none of them (P11).
#pragma once

#include "kernels/common/operation.h"

namespace deep_ep {

// What an entry is waiting for; none() if nothing.
struct Pending : Awaited {
    DEEP_EP_DEVICE static Pending none() { return {{Phase::kNone, -1, nullptr, 0}}; }
    // A word of a kind and source, until that many puts have arrived.
    DEEP_EP_DEVICE static Pending of(const Operation& op, Phase phase, u32 peer, u32 kind, u32 source, u64 puts) {
        return {{phase, static_cast<i32>(peer), op.word(kind, source), op.target(kind, source, puts)}};
    }
    // One thread. The acquire pairs with the release of the side that adds to the word: the reader of a slot (next), or
    // the writer of a chunk (chunk).
    DEEP_EP_DEVICE bool over() const {
        return word == nullptr || device::load_acquire<Scope::kSystem>(word) >= expected;
    }
    // The same, but nothing is ordered after it: acquire() follows. It leaves alone what is in the SM's L1.
    DEEP_EP_DEVICE bool looks_over() const {
        return word == nullptr || device::load_relaxed<Scope::kSystem>(word) >= expected;
    }
    // It reads that value or a later one, since it follows that load in the word's order: by the same thread, or by one
    // that has met it since. Litmus: look_then_acquire.
    DEEP_EP_DEVICE void acquire() const { (void)device::load_acquire<Scope::kSystem>(word); }
};

// One warp's part of the entries of all polling warps: every `workers`-th, starting at `worker`. `done` is in shared
// memory and counts the steps taken of each entry; each warp uses its own entries.
struct Share {
    u32* done;
    u32 worker;
    u32 workers;
};

// One thread: waits until a step of one of the warp's entries can be taken. Returns false if the operation must be
// given up. Not inlined, so that its state takes no registers while steps are taken.
template <class Work>
DEEP_EP_DEVICE_CALL bool await_step(Operation& op, const Work& work, const Share& share) {
    Pending pending = Pending::none();  // the last one found by the latest pass: a timeout names it
    const auto ready = [&] {
        for (u32 i = share.worker; i < work.entries(); i += share.workers) {
            if (share.done[i] >= work.steps(i)) continue;
            pending = work.blocked(i, share.done[i]);
            if (pending.word == nullptr) return true;
        }
        return false;
    };
    return ready() || op.wait(pending, ready);
}

// A warp: takes its share of the entries of `work` to completion.
//
//   u32 entries()               number of entries, the same for all workers
//   u32 steps(entry)            number of steps of an entry
//   Pending blocked(entry, n)   one thread: what the entry's n-th step still waits for, if anything
//   void step(entry, n)         the warp: takes the step
//   bool fill_in()              the warp, when nothing else can be done: does a part of the work that waits for
//                               nothing; returns false when none is left
template <class Work>
DEEP_EP_DEVICE void serve(Operation& op, Work& work, const Share& share) {
    for (u32 i = share.worker + device::lane() * share.workers; i < work.entries();
         i += share.workers * device::kWarpSize) {
        share.done[i] = 0;
    }
    __syncwarp();

    for (;;) {
        bool moved = false, waits = false;
        for (u32 i = share.worker; i < work.entries(); i += share.workers) {
            if (share.done[i] >= work.steps(i)) continue;
            int goes_on = 0;
            if (device::lane() == 0 && !op.failed()) goes_on = work.blocked(i, share.done[i]).word == nullptr;
            if (!broadcast(goes_on)) {
                waits = true;
                continue;
            }
            work.step(i, share.done[i]);
            __syncwarp();  // all lanes have read the count; in today's steps they meet, too
            if (device::lane() == 0) ++share.done[i];
            __syncwarp();
            moved = true;
        }
        if (broadcast(op.failed())) return;
        if (moved || work.fill_in()) continue;
        if (!waits) return;  // every entry of this warp is complete
        if (!broadcast(device::lane() != 0 || await_step(op, work, share))) return;
    }
}

}  // namespace deep_ep
