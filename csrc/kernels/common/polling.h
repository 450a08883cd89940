// A warp that serves many things which other ranks hold up, and blocks on none of them (P11).
#pragma once

#include "kernels/common/operation.h"

namespace deep_ep {

// A word of this rank's that something waits for. None: nothing holds it up.
struct Pending {
    Phase phase;
    i32 peer;
    const u64* word;
    u64 expected;

    DEEP_EP_DEVICE static Pending none() { return {Phase::kNone, -1, nullptr, 0}; }
    // Of a kind and source, until so many puts have come.
    DEEP_EP_DEVICE static Pending of(const Operation& op, Phase phase, u32 peer, u32 kind, u32 source, u64 puts) {
        return {phase, static_cast<i32>(peer), op.word(kind, source), op.target(kind, source, puts)};
    }
    // One thread. The acquire pairs with the release of the side that adds to the word: of a slot it has read (next),
    // or of a chunk it has written (chunk).
    DEEP_EP_DEVICE bool over() const {
        return word == nullptr || device::load_acquire<Scope::kSystem>(word) >= expected;
    }
};

// A warp, the `worker`-th of `workers`: takes its share of the entries of `work` to their ends. `done`: shared memory,
// a word for each entry; each warp uses its own.
//
//   u32 entries()               how many there are, the same for all workers
//   u32 steps(entry)            how many steps one takes
//   Pending blocked(entry, n)   one thread: what its n-th step waits for still, if anything
//   void step(entry, n)         the warp
//   bool fill_in()              the warp, when nothing else can be done: a part of what waits for nothing; false: there
//                               is none left
template <class Work>
DEEP_EP_DEVICE void serve(Operation& op, Work& work, u32* done, u32 worker, u32 workers) {
    const u32 entries = work.entries();
    for (u32 i = worker + device::lane() * workers; i < entries; i += workers * device::kWarpSize) done[i] = 0;
    __syncwarp();

    for (;;) {
        bool moved = false, waits = false;
        Pending pending = Pending::none();
        for (u32 i = worker; i < entries; i += workers) {
            const u32 n = done[i];
            if (n >= work.steps(i)) continue;
            int goes_on = 0;
            if (device::lane() == 0 && !op.failed()) {
                pending = work.blocked(i, n);
                goes_on = pending.word == nullptr;
            }
            if (!broadcast(goes_on)) {
                waits = true;
                continue;
            }
            work.step(i, n);
            if (device::lane() == 0) done[i] = n + 1;
            __syncwarp();
            moved = true;
        }
        if (broadcast(op.failed())) return;
        if (moved || work.fill_in()) continue;
        if (!waits) return;  // every entry of this warp has come to its end
        int goes_on = 1;
        if (device::lane() == 0) {
            goes_on = op.wait(pending.phase, pending.peer, pending.word, pending.expected, [&] {
                for (u32 i = worker; i < entries; i += workers) {
                    if (done[i] < work.steps(i) && work.blocked(i, done[i]).word == nullptr) return true;
                }
                return false;
            });
        }
        if (!broadcast(goes_on)) return;
    }
}

}  // namespace deep_ep
