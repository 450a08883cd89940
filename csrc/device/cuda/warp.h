// Where a thread stands in its block. Blocks are one-dimensional.
#pragma once

#include "device/cuda/qualifiers.h"
#include "wire/types.h"

namespace deep_ep::device {

constexpr u32 kWarpSize = 32;
constexpr u32 kFullMask = 0xffffffffu;

DEEP_EP_DEVICE u32 lane() { return threadIdx.x % kWarpSize; }
DEEP_EP_DEVICE u32 warp() { return threadIdx.x / kWarpSize; }
DEEP_EP_DEVICE u32 warps() { return (blockDim.x + kWarpSize - 1) / kWarpSize; }

// barrier.cta.sync rather than bar.sync: the threads of a warp need not arrive together.
DEEP_EP_DEVICE void barrier_sync(u32 id, u32 threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace deep_ep::device
