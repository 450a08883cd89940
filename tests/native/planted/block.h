// CUDA threads of one block: warps that exchange data through shared memory, and lanes of one warp.
#pragma once

#include "../program.h"

namespace planted::block {

constexpr u32 kRounds = 16, kBlocks = 2, kWarps = 3;

struct Args {
    u32* sums;  // per block
};

DEEP_EP_KERNEL void reduce(const void* args) {
    DEEP_EP_SHARED(u32[kWarps], partial);
    DEEP_EP_SHARED(u32[kWarps * kWarpSize], values);
    u32 total = 0;
    for (u32 round = 0; round < kRounds; round++) {
        values[threadIdx.x] = threadIdx.x + round;
        if (!bug("missing syncwarp")) __syncwarp();
        if (lane() == 0) {
            u32 sum = 0;
            for (u32 i = 0; i < kWarpSize; i++) sum += values[warp() * kWarpSize + i];
            partial[warp()] = sum;
        }
        if (!bug("missing syncthreads")) __syncthreads();
        if (threadIdx.x == 0)
            for (u32 w = 0; w < kWarps; w++) total += partial[w];
        __syncthreads();  // before the next round writes
    }
    if (threadIdx.x == 0) static_cast<const Args*>(args)->sums[blockIdx.x] = total;
}

inline void run(uint64_t seed) {
    constexpr u32 kThreads = kWarps * kWarpSize;
    std::vector<u32> sums(kBlocks);
    run_world(1, seed, [&](int) {
        launch("reduce", 0, kBlocks, kWarps, reduce, Args{sums.data()});
        Executor::get().synchronize(0, 0);
        const u32 expected = kRounds * kThreads * (kThreads - 1) / 2 + kThreads * kRounds * (kRounds - 1) / 2;
        for (u32 sum : sums) expect(sum == expected, "a block's sum is " + std::to_string(sum));
    });
}

}  // namespace planted::block
