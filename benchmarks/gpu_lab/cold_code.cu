// A kernel whose code is larger than the caches of instructions: what runs next finds them without its own.
#pragma once

#include "device/device.h"
#include "kernels/common/kernel.h"

namespace gpu_lab {

using deep_ep::u32;
using deep_ep::u64;

struct ColdCodeArgs {
    u32* target;
    u64 seed;
};

constexpr u32 kSteps = 8192;  // of two instructions, 16 bytes each: 256 KiB

// Every step has constants of its own, so that no two are alike and none can be left out.
__global__ void cold_code(const ColdCodeArgs args) {
    u32 value = static_cast<u32>(args.seed) + threadIdx.x;
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) value = (value ^ (step * 2654435761u)) * (step * 40503u | 1u);
    if (value == 0) *args.target = value;  // so that the compiler keeps all of it
}

}  // namespace gpu_lab
