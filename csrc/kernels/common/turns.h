// A block that serves many entries which other ranks hold up, and blocks on none of them (P11).
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
    // One thread; nothing is ordered after it: acquire() follows. It leaves alone what is in the SM's L1.
    DEEP_EP_DEVICE bool looks_over() const {
        return word == nullptr || device::load_relaxed<Scope::kSystem>(word) >= expected;
    }
    // One thread. The acquire pairs with the release of the side that adds to the word: the reader of a slot (next), or
    // the writer of a chunk (chunk).
    //
    // It reads that value or a later one, since it follows that load in the word's order: by the same thread, or by one
    // that has met it since. Litmus: look_then_acquire.
    DEEP_EP_DEVICE void acquire() const { (void)device::load_acquire<Scope::kSystem>(word); }
};

// A block's part of the entries of all blocks: every gridDim-th, starting at its own number.
struct Turns {
    u32* done;   // in shared memory: the steps taken of each of the block's entries
    u32* entry;  // in shared memory: whose turn it is
    u32* found;  // in shared memory: a lane has found an entry that can go on

    static constexpr u32 kNone = ~0u;

    // Words for the entries of a grid of one block, which has most.
    static constexpr u32 words(u32 entries) { return entries + 2; }
    DEEP_EP_DEVICE static Turns in(u32* words) { return {words + 2, words, words + 1}; }

    DEEP_EP_DEVICE static u32 number(u32 index) { return blockIdx.x + index * gridDim.x; }
    DEEP_EP_DEVICE static u32 index(u32 entry) { return entry / gridDim.x; }
    // Number of the block's entries.
    DEEP_EP_DEVICE static u32 own(u32 entries) {
        return entries > blockIdx.x ? (entries - blockIdx.x - 1) / gridDim.x + 1 : 0;
    }
};

// The first warp, each lane for its part of the entries: waits until a step of one of them can be taken. Returns false
// if the operation must be given up. Inlined: a call would have the work and the operation in memory, where every step
// would load from them.
template <class Work>
DEEP_EP_DEVICE bool await_turn(Operation& op, const Work& work, const Turns& turns) {
    Pending pending = Pending::none();  // the last one found by the latest pass: a timeout names it
    bool waits = false;
    const u32 own = Turns::own(work.entries());
    const auto ready = [&] {
        waits = false;
        for (u32 i = device::lane(); i < own; i += device::kWarpSize) {
            const u32 entry = Turns::number(i);
            if (turns.done[i] >= work.steps(entry)) continue;
            waits = true;
            pending = work.blocked(entry, turns.done[i]);
            if (pending.word == nullptr) device::store_relaxed<Scope::kBlock>(turns.found, 1u);
        }
        return !waits || device::load_relaxed<Scope::kBlock>(turns.found) != 0;
    };
    if (device::lane() == 0) device::store_relaxed<Scope::kBlock>(turns.found, 0u);
    __syncwarp();  // the mark is clear
    const bool goes_on = ready() || op.wait(pending, ready);
    return __all_sync(device::kFullMask, goes_on) != 0;
}

// The first warp: finds an entry whose next step can be taken, and waits until there is one. It begins with the block's
// `first`-th, counted in a circle. kNone: all of the block's entries are complete, or the operation must be given up.
template <class Work>
DEEP_EP_DEVICE u32 next_turn(Operation& op, Work& work, const Turns& turns, u32 first) {
    const u32 own = Turns::own(work.entries());
    const auto index_at = [&](u32 at) { return (first + at) % own; };
    for (;;) {
        bool left = false;
        for (u32 base = 0; base < own; base += device::kWarpSize) {
            const u32 at = base + device::lane(), i = index_at(at), entry = Turns::number(i);
            const bool unfinished = at < own && turns.done[i] < work.steps(entry);
            const bool ready = unfinished && work.blocked(entry, turns.done[i]).word == nullptr;
            const u32 mask = __ballot_sync(device::kFullMask, ready);
            __syncwarp();  // other lanes acquire what this one has seen: a vote orders nothing, so they could see less
            if (mask != 0) return Turns::number(index_at(base + static_cast<u32>(__ffs(static_cast<int>(mask))) - 1));
            left = __any_sync(device::kFullMask, unfinished) != 0 || left;
        }
        if (!left || !await_turn(op, work, turns)) return Turns::kNone;
    }
}

// The block: takes its share of the entries of `work` to completion, one step of one entry at a time, or gives up.
//
//   u32 entries()               number of entries, the same for all blocks
//   u32 steps(entry)            number of steps of an entry
//   Pending blocked(entry, n)   one thread, by relaxed loads: what the entry's n-th step still waits for, if anything
//   bool open(entry, n)         the first warp: acquires what the step waited for, and checks it. False: it has failed
//   void step(entry, n)         each warp: its part of the step
//   void close(entry, n)        the first warp, once all parts are complete: tells other ranks
template <class Work>
DEEP_EP_DEVICE void take_turns(Operation& op, Work& work, const Turns& turns) {
    for (u32 i = threadIdx.x; i < Turns::own(work.entries()); i += blockDim.x) turns.done[i] = 0;
    if (!op.sync_block()) return;  // the counts are clear
    // Each entry gets its turn before the same one again, and not all ranks begin with the same peer.
    u32 first = op.rank();
    for (;;) {
        // One warp decides for all: others could find other words arrived, and take part in another step (P14).
        if (device::warp() == 0) {
            u32 entry = next_turn(op, work, turns, first);
            if (entry != Turns::kNone && !work.open(entry, turns.done[Turns::index(entry)])) entry = Turns::kNone;
            if (device::lane() == 0) *turns.entry = entry;
        }
        if (!op.sync_block()) return;  // what the first warp has acquired is visible to all
        const u32 entry = *turns.entry;
        if (entry == Turns::kNone) return;
        first = Turns::index(entry) + 1;
        u32* const done = turns.done + first - 1;
        const u32 n = *done;
        work.step(entry, n);
        if (!op.sync_block()) return;  // all parts are complete, and all have read whose turn it is
        if (device::warp() != 0) continue;
        work.close(entry, n);
        __syncwarp();
        if (device::lane() == 0) *done = n + 1;
        __syncwarp();  // the count is up to date
    }
}

}  // namespace deep_ep
