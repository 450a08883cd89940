// expand_slots: gives every choice of the received rows its place in the expanded layout, where the rows of each local
// expert are contiguous. It runs after the dispatch kernel of the same operation; no other rank is involved. Or, before
// that kernel, it numbers this rank's own choices of each expert of all ranks, for layouts that their senders make.
//
// The rows are cut into chunks. A first launch counts each chunk's choices of each expert, the second numbers the
// choices of a chunk from where those of the chunks before it end. No atomics, so the result is the same on every run.
#pragma once

#include "kernels/common/expert_ids.h"
#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"
#include "kernels/common/shape.h"

namespace deep_ep {

// The rows of the local experts in the expanded layout. Those of each expert begin at a multiple of `alignment`.
struct ExpertRanges {
    const i32* rows;  // [experts] device pointer; written by notify. Null: all experts' begin at 0
    u32 experts;
    u32 alignment;

    DEEP_EP_DEVICE u32 aligned(u32 count) const { return wire::ceil_div(count, alignment) * alignment; }
    // Where an expert's rows begin.
    DEEP_EP_DEVICE u32 begin(u32 expert) const {
        u32 sum = 0;
        for (u32 e = 0; e < expert; ++e) sum += aligned(static_cast<u32>(rows[e]));
        return sum;
    }
};

constexpr u32 kChoiceChunks = 64;

// Copied at launch. Pointers are device pointers.
struct ExpandSlotsArgs {
    CallArgs call;
    RuntimeShape shape;
    u32 counted;          // 0: the first launch; 1: the second
    u32 working;          // warps of a block that work: choosing_warps()
    u32 rows;             // of the output that is not expanded: as many as arrived, or more
    const i32* received;  // rows that arrived; null: all
    ExpertIds topk_idx;   // [rows, topk] ids of `experts`, -1: none
    ExpertRanges experts;
    u32 expanded_rows;  // of the expanded layout
    u32* counts;        // [kChoiceChunks, experts] choices of each chunk
    i32* slots;         // [rows, topk] index in the expanded layout, -1: none
};

// A working warp has a number for each expert in shared memory. With very many experts, only some warps of a block
// work.
constexpr u32 choosing_warps(u32 warps, u32 experts) {
    constexpr u32 kNumbers = 8192;
    const u32 fit = experts != 0 && experts < kNumbers ? kNumbers / experts : 1;
    return fit < warps ? fit : warps;
}

// How the rows are cut: at least one chunk, possibly without rows.
struct ChoiceChunks {
    u32 rows, topk, rows_per_chunk;

    DEEP_EP_DEVICE static ChoiceChunks of(u32 rows, u32 topk) {
        constexpr u32 kFewRows = 8;
        const u32 each = wire::ceil_div(rows, kChoiceChunks);
        return {rows, topk, each < kFewRows ? kFewRows : each};
    }
    DEEP_EP_DEVICE u32 count() const { return rows == 0 ? 1 : wire::ceil_div(rows, rows_per_chunk); }
    DEEP_EP_DEVICE u64 first(u32 chunk) const {
        const u64 row = u64{chunk} * rows_per_chunk;
        return (row < rows ? row : rows) * topk;
    }
    DEEP_EP_DEVICE u64 end(u32 chunk) const { return first(chunk + 1); }
};

// A warp: takes the choices [first, last) of a chunk in order, and advances `ends` of an expert by each of its choices.
// `take(choice, end)` is called with the end before it for a choice of one of the experts, and with -1 for others. As
// in notify's scan, a batch of ids is loaded before the first of them is counted.
template <class Take>
DEEP_EP_DEVICE void take_choices(const ExpandSlotsArgs& args, u64 first, u64 last, u32* ends, Take take) {
    constexpr u32 kSteps = 16;
    const u32 lanes_below = (1u << device::lane()) - 1;
    for (u64 batch = first; batch < last; batch += kSteps * device::kWarpSize) {
        i64 ids[kSteps];
#pragma unroll
        for (u32 s = 0; s < kSteps; ++s) {
            const u64 choice = batch + s * device::kWarpSize + device::lane();
            ids[s] = choice < last ? args.topk_idx.get(choice) : -1;
        }
#pragma unroll
        for (u32 s = 0; s < kSteps; ++s) {
            const u64 choice = batch + s * device::kWarpSize + device::lane();
            const bool here = static_cast<u64>(ids[s]) < args.experts.experts;
            if (!here && choice < last) take(choice, -1);
            // One expert at a time, in no particular order: that of the lowest lane which is left.
            for (u32 left = __ballot_sync(device::kFullMask, here); left != 0;) {
                const u32 leader = static_cast<u32>(__ffs(static_cast<int>(left))) - 1;
                const u32 expert = __shfl_sync(device::kFullMask, static_cast<u32>(ids[s]), leader);
                const bool same = here && static_cast<u32>(ids[s]) == expert;
                const u32 mask = __ballot_sync(device::kFullMask, same), end = ends[expert];
                if (same) take(choice, static_cast<i64>(end + __popc(mask & lanes_below)));
                __syncwarp();  // all lanes have read the end
                if (device::lane() == 0) ends[expert] = end + __popc(mask);
                __syncwarp();  // it is advanced before it is read again
                left &= ~mask;
            }
        }
    }
}

// A warp, in the second launch: where a chunk's choices of each expert begin.
DEEP_EP_DEVICE void find_ends(const ExpandSlotsArgs& args, u32 chunk, u32* ends) {
    const u32 experts = args.experts.experts;
    u32 begin = 0;  // of the first of the experts that the lanes have
    for (u32 first = 0; first < experts; first += device::kWarpSize) {
        const u32 e = first + device::lane();
        const bool there = e < experts && args.experts.rows != nullptr;
        const u32 rows = there ? args.experts.aligned(static_cast<u32>(args.experts.rows[e])) : 0;
        u32 sum = rows;
        for (u32 step = 1; step < device::kWarpSize; step *= 2) {
            const u32 below = __shfl_up_sync(device::kFullMask, sum, step);
            if (device::lane() >= step) sum += below;
        }
        u32 end = begin + sum - rows;
        for (u32 before = 0; e < experts && before < chunk; ++before) end += args.counts[u64{before} * experts + e];
        if (e < experts) ends[e] = end;
        begin += __shfl_sync(device::kFullMask, sum, device::kWarpSize - 1);
    }
}

// Works with any grid size.
template <class Shape>
DEEP_EP_KERNEL void expand_slots(DEEP_EP_ARGUMENT const ExpandSlotsArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    const u32 topk = Shape::of(args.shape).topk(), experts = args.experts.experts;
    const u32 arrived = args.received == nullptr ? args.rows : static_cast<u32>(*args.received);
    const u32 received = arrived < args.rows ? arrived : args.rows;
    const u32 working = args.working;
    auto* const ends = reinterpret_cast<u32*>(shared) + device::warp() * experts;

    const auto chunks = ChoiceChunks::of(received, topk);
    const u32 first = device::warp() < working ? blockIdx.x * working + device::warp() : kChoiceChunks;
    for (u32 c = first; c < chunks.count(); c += gridDim.x * working) {
        __syncwarp();  // the ends of the previous chunk have been read
        if (args.counted == 0) {
            for (u32 e = device::lane(); e < experts; e += device::kWarpSize) ends[e] = 0;
        } else {
            find_ends(args, c, ends);
        }
        __syncwarp();  // the ends are complete
        if (args.counted == 0) {
            take_choices(args, chunks.first(c), chunks.end(c), ends, [](u64, i64) {});
            for (u32 e = device::lane(); e < experts; e += device::kWarpSize)
                args.counts[u64{c} * experts + e] = ends[e];
            continue;
        }
        take_choices(args, chunks.first(c), chunks.end(c), ends,
                     [&](u64 choice, i64 slot) { args.slots[choice] = static_cast<i32>(slot); });
        // Without a host wait the layout has room for distinct choices.
        for (u32 e = device::lane(); c + 1 == chunks.count() && e < experts; e += device::kWarpSize) {
            if (ends[e] <= args.expanded_rows) continue;
            op.fail(wire::kOverflow, Phase::kBounds, static_cast<i32>(op.rank()), args.expanded_rows, ends[e]);
        }
    }
    if (args.counted == 0) return;
    // The rows that no rank has sent.
    const u64 step = u64{gridDim.x} * blockDim.x;
    for (u64 i = u64{received} * topk + blockIdx.x * blockDim.x + threadIdx.x; i < u64{args.rows} * topk; i += step) {
        args.slots[i] = -1;
    }
}

struct ExpandSlotsKernel {
    static constexpr const char* kName = "expand_slots";
    using Args = ExpandSlotsArgs;
    template <class Shape>
    static constexpr auto kEntry = expand_slots<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) {
        return choosing_warps(block.warps, block.experts) * block.experts * static_cast<u32>(sizeof(u32));
    }
};

}  // namespace deep_ep
