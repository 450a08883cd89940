// CUDA threads of two ranks: a ring in the receiver's memory; two warps of the sender fill it, one of the receiver
// reads.
#pragma once

#include "../program.h"

namespace planted::ring {

constexpr u32 kItems = 96, kSlots = 4, kWords = 64;  // the ring wraps often: a write that is too early hits a full slot

struct Ring {
    u64 tail = 0;  // items written
    u64 head = 0;  // items read
    u32 slots[kSlots][kWords] = {};
};

struct Args {
    Ring* ring;
    u32* out;  // [kItems][kWords]
};

inline u32 value(u32 item, u32 word) { return item * 1000 + word; }

// Each item is written by both warps, half each.
DEEP_EP_KERNEL void send(const void* args) {
    Ring& ring = *static_cast<const Args*>(args)->ring;
    constexpr u32 kHalf = kWords / 2;
    for (u32 item = 0; item < kItems; item++) {
        u64 head = 0;
        if (lane() == 0) {
            WaitNote note{"room in the ring", 1, item + 1 - min(item + 1, kSlots), &ring.head};
            const auto has_room = [&] {
                head = load_acquire<Scope::kSystem>(&ring.head);
                return item - head < kSlots;
            };
            spin_until(has_room, cpu::kForever, &note);  // line: waits for room
        }
        // The shuffle carries the value of head, but no order: what lane 0 acquired is passed on only by a barrier.
        head = __shfl_sync(kFullMask, head, 0);
        if (!bug("missing syncwarp")) __syncwarp();
        u32* slot = ring.slots[item % kSlots] + warp() * kHalf;
        for (u32 i = lane(); i < kHalf; i += kWarpSize) slot[i] = value(item, warp() * kHalf + i);
        if (bug("shuffle for barrier"))
            __shfl_sync(kFullMask, head, 0);
        else if (!bug("missing barrier"))
            barrier_or(1, 2 * kWarpSize, false);
        if (threadIdx.x == 0) {
            if (bug("relaxed tail"))
                store_relaxed<Scope::kSystem>(&ring.tail, item + 1);
            else
                store_release<Scope::kSystem>(&ring.tail, item + 1);
        }
    }
}

DEEP_EP_KERNEL void receive(const void* args) {
    Ring& ring = *static_cast<const Args*>(args)->ring;
    u32* out = static_cast<const Args*>(args)->out;
    for (u32 item = 0; item < kItems; item++) {
        if (lane() == 0) {
            WaitNote note{"an item", 0, item + 1, &ring.tail};
            spin_until([&] { return load_acquire<Scope::kSystem>(&ring.tail) > item; }, cpu::kForever, &note);
        }
        __syncwarp();
        for (u32 i = lane(); i < kWords; i += kWarpSize) out[item * kWords + i] = ring.slots[item % kSlots][i];
        __syncwarp();
        if (lane() == 0 && !bug("lost head")) store_release<Scope::kSystem>(&ring.head, item + 1);
    }
}

inline void run(uint64_t seed) {
    Ring ring;
    std::vector<u32> out(kItems * kWords);
    const Args args{&ring, out.data()};
    run_world(2, seed, [&](int rank) {
        if (rank == 0)
            launch("send", 0, 1, 2, send, args);
        else
            launch("receive", 1, 1, 1, receive, args);
        Executor::get().synchronize(rank, 0);
        if (rank == 0) return;
        for (u32 i = 0; i < kItems * kWords; i++)
            expect(out[i] == value(i / kWords, i % kWords), "item " + std::to_string(i / kWords) + " is wrong");
    });
}

}  // namespace planted::ring
