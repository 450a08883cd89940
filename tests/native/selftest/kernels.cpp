#include "kernels.h"

#include "device/device.h"

namespace selftest {
namespace {

using namespace deep_ep::device;

const Args& as_args(const void* args) { return *static_cast<const Args*>(args); }

// Every thread adds 1.
DEEP_EP_KERNEL void add(const void* args) { add_relaxed<Scope::kSystem>(as_args(args).word, 1); }

DEEP_EP_KERNEL void signal(const void* args) {
    if (threadIdx.x == 0) store_release<Scope::kSystem>(as_args(args).word, as_args(args).value);
}

// Waits for the word; result[0]: 1 if it arrived, 2 if the deadline did; result[1]: the time then.
DEEP_EP_KERNEL void wait(const void* args) {
    const Args& a = as_args(args);
    if (threadIdx.x != 0) return;
    WaitNote note{"a signal", 1, a.value, a.word};
    const bool met = spin_until([&] { return load_acquire<Scope::kSystem>(a.word) >= a.value; }, a.deadline, &note);
    if (!a.result) return;
    a.result[0] = met ? 1 : 2;
    a.result[1] = now_ns();
}

// Rounds between two ranks: `value` of them; this rank adds when the word is odd (if result is set) or even.
DEEP_EP_KERNEL void ping_pong(const void* args) {
    const Args& a = as_args(args);
    if (threadIdx.x != 0) return;
    const u64 mine = a.result ? 1 : 0;
    for (u64 round = 0; round < a.value; round++) {
        const u64 turn = 2 * round + mine;
        WaitNote note{"my turn", static_cast<i32>(1 - mine), turn, a.word};
        spin_until([&] { return load_acquire<Scope::kSystem>(a.word) == turn; }, cpu::kForever, &note);
        store_release<Scope::kSystem>(a.word, turn + 1);
    }
}

// Counts wrong values that threads see in shared memory.
DEEP_EP_KERNEL void shared(const void* args) {
    struct Pair {
        u64 number, block;
    };
    DEEP_EP_SHARED(u32[64], table);
    DEEP_EP_SHARED(Pair, pair);
    DEEP_EP_DYNAMIC_SHARED(u32, dynamic);
    u64 wrong = 0;
    if (cpu::kExact && threadIdx.x == 0) wrong += table[0] != 0xA5A5A5A5u || dynamic[0] != 0xA5A5A5A5u;
    wrong += reinterpret_cast<u64>(dynamic) % 128 != 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < 64; i += blockDim.x) table[i] = dynamic[i] = i * 100 + blockIdx.x;
    if (threadIdx.x == 0) pair = {as_args(args).value, blockIdx.x};
    __syncthreads();
    for (u32 i = 0; i < 64; i++) wrong += table[i] != i * 100 + blockIdx.x || dynamic[i] != i * 100 + blockIdx.x;
    wrong += pair.number != as_args(args).value || pair.block != blockIdx.x;
    if (wrong) add_relaxed<Scope::kSystem>(as_args(args).word, wrong);
}

// Counts wrong results of shuffles and votes, for any warp width.
DEEP_EP_KERNEL void collectives(const void* args) {
    const u32 self = lane(), last = kWarpSize - 1;
    const auto bit = [](u32 n) { return 1u << n; };
    u64 wrong = 0;
    wrong += __shfl_sync(kFullMask, self * 3, 0) != 0;
    wrong += __shfl_sync(kFullMask, self * 3, static_cast<int>(last)) != last * 3;
    wrong +=
        __shfl_sync(kFullMask, 1.5 * self, static_cast<int>((self + 1) % kWarpSize)) != 1.5 * ((self + 1) % kWarpSize);
    wrong += __shfl_up_sync(kFullMask, u64{self}, 1) != (self ? self - 1 : 0);
    wrong +=
        __shfl_xor_sync(kFullMask, static_cast<i32>(self), static_cast<int>(last)) != static_cast<i32>(self ^ last);
    wrong += __ballot_sync(kFullMask, self == last) != bit(last);
    wrong += __ballot_sync(kFullMask, 1) != kFullMask;
    wrong += __any_sync(kFullMask, self == last) != 1 || __any_sync(kFullMask, 0) != 0;
    wrong += __all_sync(kFullMask, 1) != 1 || __all_sync(kFullMask, self == last) != (kWarpSize == 1);
    if (kWarpSize >= 4) {
        // Segments, and parts of the warp that synchronize independently.
        wrong += __shfl_sync(kFullMask, self, 1, 2) != (self | 1);
        wrong += __shfl_up_sync(kFullMask, self, 1, 2) != (self & ~1u);
        const u32 low = kFullMask >> (kWarpSize / 2), half = self < kWarpSize / 2 ? low : kFullMask & ~low;
        for (int i = 0; i < 3; i++) wrong += __ballot_sync(half, 1) != half;
        __syncwarp(half);
    }
    wrong += __popc(0xF0u) != 4 || __ffs(0x10) != 5 || min(2u, 3u) != 2 || max(-2, 3) != 3;
    if (wrong) add_relaxed<Scope::kSystem>(as_args(args).word, wrong);
}

// Pairs of warps meet at named barriers, then all at __syncthreads; counts threads that passed too early.
DEEP_EP_KERNEL void barriers(const void* args) {
    DEEP_EP_SHARED(u32[16], arrived);
    u64 wrong = 0;
    if (threadIdx.x < 16) arrived[threadIdx.x] = 0;
    __syncthreads();
    const u32 pair = warp() / 2;
    for (u32 round = 1; round <= 5; round++) {
        add_relaxed<Scope::kBlock>(&arrived[pair], 1);
        barrier_or(1 + pair, 2 * kWarpSize, false);
        wrong += load_relaxed<Scope::kBlock>(&arrived[pair]) != round * 2 * kWarpSize;
        barrier_or(1 + pair, 2 * kWarpSize, false);
    }
    __syncthreads();
    if (threadIdx.x % 2) return;  // __syncthreads is for the remaining threads
    __syncthreads();
    for (u32 p = 0; p < warps() / 2; p++) wrong += arrived[p] != 5 * 2 * kWarpSize;
    if (wrong) add_relaxed<Scope::kSystem>(as_args(args).word, wrong);
}

// Only the first warp reaches a barrier for all: no thread can ever continue.
DEEP_EP_KERNEL void half_barrier(const void*) {
    if (warp() == 0) barrier_or(1, blockDim.x, false);
}

}  // namespace

const std::map<std::string, cpu::Entry> kKernels = {
    {"add", add},       {"signal", signal},           {"wait", wait},         {"ping_pong", ping_pong},
    {"shared", shared}, {"collectives", collectives}, {"barriers", barriers}, {"half_barrier", half_barrier},
};

void echo(u64* word) {
    u64 seen = 0;
    for (;;) {
        cpu::wait_until([&] { return load_acquire<Scope::kSystem>(word) > seen; }, "a larger word");
        const u64 now = load_acquire<Scope::kSystem>(word);
        cpu::yield();
        add_release<Scope::kSystem>(word + 1, now - seen);
        seen = now;
    }
}

}  // namespace selftest
