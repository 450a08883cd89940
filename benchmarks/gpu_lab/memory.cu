// Reads and writes in the proportion of a dispatch with top-8 of 256 experts on 8 ranks: each row goes to 5.25 of them.
#pragma once

#include "device/device.h"
#include "kernels/common/kernel.h"

namespace gpu_lab {

using deep_ep::u32;
using deep_ep::u64;

struct SpreadArgs {
    const uint4* source;
    uint4* target;  // kMost copies of the source, one behind the other
    u64 pieces;     // of 16 bytes, in the source
};

constexpr u32 kLeast = 5, kMost = 6;  // every third piece goes to one place more: 16 writes for 3 reads
constexpr u32 kEvery = 3;
constexpr u32 kAhead = 4;  // loads of a thread in flight

__global__ void spread(const SpreadArgs args) {
    const u64 step = u64{gridDim.x} * blockDim.x;
    for (u64 first = u64{blockIdx.x} * blockDim.x + threadIdx.x; first < args.pieces; first += kAhead * step) {
        uint4 pieces[kAhead];
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) {
            if (const u64 piece = first + i * step; piece < args.pieces) pieces[i] = args.source[piece];
        }
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) {
            const u64 piece = first + i * step;
            if (piece >= args.pieces) continue;
            const u32 copies = piece / blockDim.x % kEvery == 0 ? kMost : kLeast;  // the same for all threads of a warp
            for (u32 copy = 0; copy < copies; ++copy) args.target[copy * args.pieces + piece] = pieces[i];
        }
    }
}

}  // namespace gpu_lab
