// Copies memory as warps copy rows: by bulk copies through a ring of pieces, with so many loads ahead of the stores.
#pragma once

#include "device/cuda/bulk.h"
#include "device/device.h"
#include "kernels/common/kernel.h"

namespace gpu_lab {

using deep_ep::u32;
using deep_ep::u64;
using deep_ep::u8;
namespace bulk = deep_ep::device::bulk;

struct RingArgs {
    const u8* source;
    u8* target;
    u64 pieces;
};

constexpr u32 kPieceBytes = 2048, kBarrierBytes = 128;

constexpr u32 ring_bytes(u32 ahead) { return (ahead + 1) * kPieceBytes + kBarrierBytes; }

// The first lane of each warp copies an equal share of consecutive pieces.
template <u32 kAhead>
__global__ void ring(const RingArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    constexpr u32 kSlots = kAhead + 1;
    const u32 warp = threadIdx.x / 32, warps = gridDim.x * (blockDim.x / 32);
    const u64 index = u64{blockIdx.x} * (blockDim.x / 32) + warp;
    const u64 begin = args.pieces * index / warps, end = args.pieces * (index + 1) / warps;
    if (threadIdx.x % 32 != 0) return;
    const u32 barriers = bulk::shared_address(shared) + warp * ring_bytes(kAhead), stage = barriers + kBarrierBytes;
    for (u32 slot = 0; slot < kSlots; ++slot) bulk::init_barrier(barriers + slot * sizeof(u64), 1);
    bulk::fence_shared();
    u64 loaded = begin;
    const auto load = [&] {
        if (loaded == end) return;
        const u32 slot = static_cast<u32>((loaded - begin) % kSlots), barrier = barriers + slot * sizeof(u64);
        bulk::expect(barrier, kPieceBytes);
        bulk::load(stage + slot * kPieceBytes, args.source + loaded++ * kPieceBytes, kPieceBytes, barrier);
    };
    for (u32 i = 0; i < kAhead; ++i) load();
    for (u64 stored = begin; stored < end; ++stored) {
        const u32 use = static_cast<u32>(stored - begin), slot = use % kSlots;
        bulk::wait(barriers + slot * sizeof(u64), use / kSlots & 1u);
        bulk::store(args.target + stored * kPieceBytes, stage + slot * kPieceBytes, kPieceBytes);
        bulk::commit();
        bulk::wait_read<1>();  // the piece before this one has been read
        load();
    }
    bulk::wait_all();
}

}  // namespace gpu_lab
