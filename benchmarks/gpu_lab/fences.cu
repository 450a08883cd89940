// The cost of single operations in cycles of an SM's clock, as a warp sees it: fences, atomics, loads and bulk loads.
// Every kernel writes the mean of one thread of the first block to `cycles`.
#pragma once

#include "device/cuda/bulk.h"
#include "device/device.h"
#include "kernels/common/kernel.h"

namespace gpu_lab {

using deep_ep::u32;
using deep_ep::u64;
namespace bulk = deep_ep::device::bulk;

constexpr u32 kTimes = 64;           // each operation is timed so often
constexpr u64 kSpread = 1ull << 30;  // bytes of memory that the operations are spread over

struct Args {
    u64* cycles;
    char* memory;  // kSpread bytes, and a little more
    u64 amount;    // what it means depends on the kernel
    u64 spread;    // bytes of `memory` that may be used
};

__device__ u64 now() {
    u64 cycles;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
    return cycles;
}

__device__ void report(const Args& args, u64 sum) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.cycles = sum / kTimes;
}

// --- fences, after `amount` stores of 16 bytes by every lane ---------------------------------------------------------

struct NoFence {
    static __device__ void run() {}
};
struct FenceProxy {
    static __device__ void run() { asm volatile("fence.proxy.async;" ::: "memory"); }
};
struct FenceProxyShared {
    static __device__ void run() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
};
struct FenceProxyGlobal {
    static __device__ void run() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
};
struct FenceGpu {
    static __device__ void run() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
};
struct FenceSystem {
    static __device__ void run() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
};

__device__ void store_16_bytes(char* target, u32 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %1, %1, %1};" ::"l"(target), "r"(value) : "memory");
}

template <class Fence>
__global__ void fence(const Args args) {
    constexpr u64 kApart = 4ull << 20;  // consecutive stores of a lane are in different pages
    char* const own = args.memory + (u64{blockIdx.x} * blockDim.x + threadIdx.x) * 16;
    u64 sum = 0;
    for (u32 i = 0; i < kTimes; ++i) {
        for (u64 store = 0; store < args.amount; ++store) {
            store_16_bytes(own + (i * args.amount + store) * kApart % args.spread, i);
        }
        const u64 begin = now();
        Fence::run();
        sum += now() - begin;
    }
    report(args, sum);
}

// --- additions whose result nobody reads -----------------------------------------------------------------------------

struct AtomOnGenericAddress {
    static __device__ void add(char* word) {
        u64 before;
        asm volatile("atom.relaxed.sys.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(word) : "memory");
    }
};
struct RedOnGlobalAddress {
    static __device__ void add(char* word) {
        asm volatile("red.relaxed.sys.global.add.u64 [%0], 1;" ::"l"(word) : "memory");
    }
};

template <class Addition>
__global__ void addition(const Args args) {
    constexpr u64 kApart = 256;
    u64 sum = 0;
    for (u32 i = 0; i < kTimes; ++i) {
        const u64 begin = now();
        Addition::add(args.memory + i * kApart);
        sum += now() - begin;
    }
    report(args, sum);
}

// --- loads -----------------------------------------------------------------------------------------------------------

// Each load depends on the one before. `amount`: bytes from one to the next. The first pass finds nothing in the L2
// cache, the second all of it, and that time goes to the next word of `cycles`.
__global__ void dependent_loads(const Args args) {
    u64 next = 0;
    for (u32 pass = 0; pass < 2; ++pass) {
        const u64 begin = now();
        for (u32 i = 0; i < kTimes; ++i) {
            const char* const from = args.memory + (i * args.amount) % args.spread + next;
            u64 value;
            asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
            next = value & 0;  // the compiler does not know the outcome of an asm
        }
        args.cycles[pass] = (now() - begin + next) / kTimes;
    }
}

// One thread of each block waits for each bulk load of `amount` bytes into shared memory before it begins the next.
// It is a template so that it compiles only where it is used: not every GPU has bulk copies.
template <class = void>
__global__ void bulk_loads(const Args args) {
    extern __shared__ __align__(128) char stage[];
    __shared__ u64 word;
    if (threadIdx.x != 0) return;
    const u32 barrier = bulk::shared_address(&word), bytes = static_cast<u32>(args.amount);
    bulk::init_barrier(barrier, 1);
    asm volatile("fence.proxy.async;" ::: "memory");
    constexpr u64 kApart = 64 << 10, kBetween = 37;  // no two loads of a block are near each other
    u64 sum = 0;
    for (u32 i = 0; i < kTimes; ++i) {
        const char* const from = args.memory + ((u64{i} * kBetween + blockIdx.x) * kApart) % args.spread;
        const u64 begin = now();
        bulk::expect(barrier, bytes);
        bulk::load(bulk::shared_address(stage), from, bytes, barrier);
        bulk::wait(barrier, i & 1);
        sum += now() - begin;
    }
    report(args, sum);
}

}  // namespace gpu_lab
