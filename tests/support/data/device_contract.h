// A kernel that uses every name of device/device.h in each of its forms, to prove that both implementations have them.
#pragma once

#include "device/bf16.h"
#include "device/device.h"
#include "device/logfmt.h"
#include "kernels/common/kernel.h"
#include "kernels/common/shape.h"

namespace deep_ep::test {

using device::Scope;

struct ContractArgs {
    u8* rows;
    u8* const* targets;
    const u8* const* sources;
    u8* bias;
    u32* words32;
    i32* signed32;
    u64* words64;
    i64* signed64;
    u64 deadline_ns;
    u32 row_bytes;
    u32 count;
};

template <Scope S>
DEEP_EP_DEVICE u64 every_access(const ContractArgs& args) {
    u64 seen = device::load_relaxed<S>(args.words32) + device::load_acquire<S>(args.words32 + 1);
    seen += device::load_relaxed<S>(args.words64) + device::load_acquire<S>(args.words64 + 1);
    seen += static_cast<u64>(device::load_relaxed<S>(args.signed32) + device::load_acquire<S>(args.signed32 + 1));
    seen += static_cast<u64>(device::load_relaxed<S>(args.signed64) + device::load_acquire<S>(args.signed64 + 1));
    device::store_relaxed<S>(args.words32 + 2, 1u);
    device::store_release<S>(args.words32 + 3, 1u);
    device::store_relaxed<S>(args.words64 + 2, 1u);
    device::store_release<S>(args.words64 + 3, 1u);
    device::store_relaxed<S>(args.signed32 + 2, -1);
    device::store_release<S>(args.signed32 + 3, -1);
    device::store_relaxed<S>(args.signed64 + 2, -1);
    device::store_release<S>(args.signed64 + 3, -1);
    if constexpr (S != Scope::kBlock) {  // a block adds to words in shared memory
        device::add_relaxed<S>(args.words32 + 4, 1u);
        device::add_release<S>(args.words32 + 5, 1u);
        device::add_relaxed<S>(args.words64 + 4, 1u);
        device::add_release<S>(args.words64 + 5, 1u);
        device::add_relaxed<S>(args.signed32 + 4, -1);
        device::add_release<S>(args.signed32 + 5, -1);
    }
    seen += device::fetch_add_relaxed<S>(args.words32 + 6, 1u) + device::fetch_add_release<S>(args.words64 + 6, 1u);
    seen += device::fetch_add_acq_rel<S>(args.words32 + 6, 1u) + device::fetch_add_acq_rel<S>(args.words64 + 6, 1u);
    seen += static_cast<u64>(device::fetch_add_acq_rel<S>(args.signed32 + 6, -1));
    seen += device::cas_acq_rel<S>(args.words32 + 7, 0u, 1u) + device::cas_acq_rel<S>(args.words64 + 7, 0u, 1u);
    device::cas_relaxed<S>(args.words32 + 7, 0u, 1u);
    device::cas_acquire<S>(args.words32 + 7, 0u, 1u);
    device::cas_release<S>(args.words64 + 7, 0u, 1u);
    return seen;
}

// Lanes and votes. Called by all lanes.
DEEP_EP_DEVICE u32 every_collective(u32 value) {
    value += __shfl_sync(device::kFullMask, value, 0);
    value += __shfl_up_sync(device::kFullMask, value, 1);
    value += __shfl_xor_sync(device::kFullMask, value, 1);
    const u32 mask = __ballot_sync(device::kFullMask, value & 1);
    if (__any_sync(device::kFullMask, value == 7)) value += static_cast<u32>(__popc(mask));
    if (__all_sync(device::kFullMask, value != 7)) value += static_cast<u32>(__ffs(static_cast<i32>(mask)));
    __syncwarp();
    __syncwarp(device::kFullMask);
    return min(value, max(mask, 1u));
}

template <class Shape>
DEEP_EP_KERNEL void contract(const ContractArgs args) {
    DEEP_EP_SHARED(u32[4], flags);
    DEEP_EP_DYNAMIC_SHARED(u64, totals);
    const u32 row_bytes = Shape::row_bytes();
    const u64 row = static_cast<u64>(blockIdx.x * device::warps() + device::warp()) * row_bytes;

    if (threadIdx.x < 4) flags[threadIdx.x] = 0;
    __syncthreads();
    totals[threadIdx.x] = every_access<Scope::kBlock>(args) + every_access<Scope::kDevice>(args) +
                          every_access<Scope::kSystem>(args) + every_collective(device::lane());
    device::add_relaxed<Scope::kBlock>(&flags[0], 1u);
    device::barrier_or(1, blockDim.x, false);

    device::warp_copy(args.rows + row, args.sources[0] + row, row_bytes);
    __syncwarp();
    device::RowCopies copies(reinterpret_cast<u8*>(totals + blockDim.x) +
                             device::warp() * device::RowCopies::kSharedBytes);
    copies.to_many(args.targets, args.count, args.rows + row, row_bytes, true);
    copies.finish();
    device::warp_sum_bf16(args.rows + row, args.sources, args.count, args.bias, nullptr, row_bytes / 2);
    const LogRows log_rows{args.sources[0], args.bias, log_row_bytes(row_bytes / 2), log_rest_bytes(row_bytes / 2)};
    const auto* const weights = reinterpret_cast<const float*>(args.words32);
    if (device::warp_cast_logfmt(args.targets[0], args.bias, args.rows + row, row_bytes / 2)) totals[threadIdx.x] += 1;
    device::warp_weighted_sum_logfmt(args.rows + row, args.sources, weights, args.count, row_bytes / 2, log_rows);

    if (threadIdx.x == 0 && blockIdx.x < gridDim.x - 1) {
        const device::WaitNote note{"test: words64", -1, 1, args.words64};
        const bool arrived = device::spin_until([&] { return device::load_acquire<Scope::kSystem>(args.words64) != 0; },
                                                args.deadline_ns, &note);
        args.words64[8] = arrived ? totals[0] : device::now_ns();
        args.words32[8] = float_to_bf16(bf16_to_float(static_cast<u16>(args.words32[8])) + 1.0f);
    }
}

struct ContractKernel {
    static constexpr u32 shared_bytes(const BlockSizes& block) { return (8 * 32 + block.copies_bytes) * block.warps; }
};

}  // namespace deep_ep::test
