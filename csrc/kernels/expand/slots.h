// expand_slots: gives every choice of the received rows its place in the expanded layout, where the rows of each local
// expert are contiguous. It runs after the dispatch kernel of the same operation; no other rank is involved. Or, before
// that kernel, it numbers this rank's own choices of each expert of all ranks, for layouts that their senders make.
#pragma once

#include "kernels/common/expert_ids.h"
#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"
#include "kernels/common/shape.h"

namespace deep_ep {

// The rows of the local experts in the expanded layout. Those of each expert begin at a multiple of `alignment`.
struct ExpertRanges {
    const i32* rows;  // [experts] device pointer; written by notify. Null: all begin at 0
    u32 experts;
    u32 alignment;

    DEEP_EP_DEVICE u32 aligned(u32 count) const { return wire::ceil_div(count, alignment) * alignment; }
    // Where an expert's rows begin.
    DEEP_EP_DEVICE u32 begin(u32 expert) const {
        u32 sum = 0;
        for (u32 e = 0; rows != nullptr && e < expert; ++e) sum += aligned(static_cast<u32>(rows[e]));
        return sum;
    }
};

// Copied at launch. Pointers are device pointers.
struct ExpandSlotsArgs {
    CallArgs call;
    RuntimeShape shape;
    u32 rows;             // of the output that is not expanded: as many as arrived, or more
    const i32* received;  // rows that arrived; null: all
    ExpertIds topk_idx;   // [rows, topk] ids of `experts`, -1: none
    ExpertRanges experts;
    u32 expanded_rows;  // of the expanded layout
    i32* slots;         // [rows, topk] index in the expanded layout, -1: none
};

// A warp: numbers the choices of one expert in the order of the rows, and of the choices of a row. No atomics, so the
// result is the same on every run. As in notify's scan, a batch of ids is loaded before the first of them is counted.
DEEP_EP_DEVICE void number_choices(const ExpandSlotsArgs& args, Operation& op, u64 choices, u32 expert) {
    constexpr u32 kSteps = 16;
    const u32 lanes_below = (1u << device::lane()) - 1;
    u32 slot = args.experts.begin(expert);
    for (u64 batch = 0; batch < choices; batch += kSteps * device::kWarpSize) {
        i64 ids[kSteps];
#pragma unroll
        for (u32 s = 0; s < kSteps; ++s) {
            const u64 choice = batch + s * device::kWarpSize + device::lane();
            ids[s] = choice < choices ? args.topk_idx.get(choice) : -1;
        }
#pragma unroll
        for (u32 s = 0; s < kSteps; ++s) {
            const u64 choice = batch + s * device::kWarpSize + device::lane();
            const bool here = ids[s] == static_cast<i64>(expert);
            const u32 mask = __ballot_sync(device::kFullMask, here);
            if (here) args.slots[choice] = static_cast<i32>(slot + __popc(mask & lanes_below));
            // The first expert's warp also marks the choices that no local expert has.
            const bool absent = static_cast<u64>(ids[s]) >= args.experts.experts;
            if (expert == 0 && absent && choice < choices) args.slots[choice] = -1;
            slot += __popc(mask);
        }
    }
    // Without a host wait the layout has room for distinct choices.
    if (slot > args.expanded_rows && device::lane() == 0) {
        op.fail(wire::kOverflow, Phase::kBounds, static_cast<i32>(op.rank()), args.expanded_rows, slot);
    }
}

// Works with any grid size.
template <class Shape>
DEEP_EP_KERNEL void expand_slots(DEEP_EP_ARGUMENT const ExpandSlotsArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    const u32 topk = Shape::of(args.shape).topk();
    const u32 received = args.received == nullptr ? args.rows : static_cast<u32>(*args.received);
    const u64 choices = u64{received < args.rows ? received : args.rows} * topk;
    const u32 warps = gridDim.x * device::warps(), warp = blockIdx.x * device::warps() + device::warp();
    for (u32 e = warp; e < args.experts.experts; e += warps) number_choices(args, op, choices, e);
    // The rows that no rank has sent.
    const u64 step = u64{warps} * device::kWarpSize;
    for (u64 i = choices + u64{warp} * device::kWarpSize + device::lane(); i < u64{args.rows} * topk; i += step) {
        args.slots[i] = -1;
    }
}

struct ExpandSlotsKernel : NoSharedMemory {
    static constexpr const char* kName = "expand_slots";
    using Args = ExpandSlotsArgs;
    template <class Shape>
    static constexpr auto kEntry = expand_slots<Shape>;
};

}  // namespace deep_ep
