// A thread's position in its block. Blocks are one-dimensional.
#pragma once

#include "device/cuda/qualifiers.h"
#include "wire/types.h"

namespace deep_ep::device {

constexpr u32 kWarpSize = 32;
constexpr u32 kFullMask = 0xffffffffu;

DEEP_EP_DEVICE u32 lane() { return threadIdx.x % kWarpSize; }
DEEP_EP_DEVICE u32 warp() { return threadIdx.x / kWarpSize; }
DEEP_EP_DEVICE u32 warps() { return (blockDim.x + kWarpSize - 1) / kWarpSize; }

// barrier.cta.red rather than bar.red: the threads of a warp need not arrive together.
DEEP_EP_DEVICE bool barrier_or(u32 id, u32 threads, bool value) {
    u32 any;
    asm volatile(
        "{\n\t"
        ".reg .pred mine, all;\n\t"
        "setp.ne.u32 mine, %3, 0;\n\t"
        "barrier.cta.red.or.pred all, %1, %2, mine;\n\t"
        "selp.u32 %0, 1, 0, all;\n\t"
        "}"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(static_cast<u32>(value))
        : "memory");
    return any != 0;
}

}  // namespace deep_ep::device
