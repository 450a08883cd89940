// The rows of one row stream at the ranks of the node: published, or in the local chunks that belong to one of its
// chunks.
#pragma once

#include "kernels/two_hops/combine_args.h"

namespace deep_ep::two_hops {

// A warp's state for gathering rows.
struct Gatherer {
    const CombineArgs& args;
    Operation& op;
    const Place& me;
    u32 row_bytes;
    u32 topk;
    const CombineTables& tables;
    NearRows* near;
    Summands into;

    DEEP_EP_DEVICE bool sends(u32 local) const { return tables.published[local].x == nullptr; }
    // The local chunk that the rank with a local index sends for a chunk of a line.
    DEEP_EP_DEVICE Pending local_chunk(u32 line, u32 chunk, u32 local) const {
        const u32 role = args.layout.role_of(line), node = args.layout.node_of(line);
        return Pending::of(op, Phase::kChunk, me.near(local), local_word(wire::kStreamChunk, role, chunk),
                           Place::stream(node, local, me.per_node), chunk / wire::kLocalSlots + 1);
    }

    // A warp: finds where the rows of chunk `chunk` of a line are; its local chunks have arrived. Returns false if the
    // operation fails. What a lane stores here is read in list() by the same lane, so the first warp barrier needed is
    // the one after the list.
    DEEP_EP_DEVICE bool find(u32 line, u32 chunk) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 role = layout.role_of(line), node = layout.node_of(line);
        bool fits = true;
        for (u32 d = device::lane(); d < me.per_node; d += device::kWarpSize) {
            near[d] = {};
            if (!me.has(d)) continue;
            const wire::StreamRows range = tables.ranges[d * layout.lines() + line];
            if (!sends(d)) {
                near[d] = {tables.published[d].x + u64{range.first} * row_bytes,
                           tables.published[d].weights + u64{range.first} * topk, 0, range.rows};
                continue;
            }
            const u32 stream = Place::stream(node, d, me.per_node);
            const u8* const message = op.local_region() + layout.local_chunk(stream, chunk % wire::kLocalSlots, role);
            const auto header = copy_once<wire::ChunkHeader>(message);
            fits = op.check_message(Phase::kChunk, me.near(d), header.operation, header.arguments) && fits;
            if (header.rows > layout.chunk_rows || u64{header.first} + header.rows > range.rows) {
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(me.near(d)), range.rows,
                        u64{header.first} + header.rows);
                fits = false;
            }
            if (!fits) continue;
            const u64 first = header.first;
            const auto* const weights =
                reinterpret_cast<const float*>(message + layout.local.topk_weights_offset(header.rows));
            near[d] = {message + layout.local.x_offset() - first * row_bytes, weights - first * topk, header.first,
                       header.rows};
        }
        return __all_sync(device::kFullMask, fits) != 0;
    }
    // A warp: appends the rows of a node row to `into`, by ascending rank, after `count` others. Returns the new count.
    // `row` is the node row's index in the table.
    DEEP_EP_DEVICE u32 list(u32 row, u32 count) const {
        const u32 lanes_below = (1u << device::lane()) - 1;
        const auto* const table = const_cast<const volatile i32*>(args.plan.table) + u64{row} * me.per_node;
        for (u32 base = 0; base < me.per_node; base += device::kWarpSize) {
            const u32 d = base + device::lane();
            const i32 index = d < me.per_node ? table[d] : -1;
            const bool there = index >= 0 && static_cast<u32>(index) - near[d].first < near[d].rows;
            if (index >= 0 && !there) {
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(me.near(d)), near[d].rows,
                        static_cast<u32>(index));
            }
            const u32 mask = __ballot_sync(device::kFullMask, there);
            if (there) {
                const u32 slot = count + __popc(mask & lanes_below);
                into.x[slot] = near[d].x + static_cast<u64>(index) * row_bytes;
                into.weights[slot] = near[d].weights + static_cast<u64>(index) * topk;
            }
            count += __popc(mask);
        }
        return count;
    }
    // One thread: the weight of a choice of the node row at `row` in the table, from the rank of the node that holds
    // it; 0 if none does, or one that is left out. What other ranks have in its place is never read.
    DEEP_EP_DEVICE float held_weight(u32 row, u32 k) const {
        const u32 d = device::read_once(static_cast<u32>(args.plan.holders[u64{row} * topk + k]));
        if (d == ~0u) return 0.0f;
        if (d >= me.per_node) {
            op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(op.rank()), me.per_node, d);
            return 0.0f;
        }
        if (!me.has(d)) return 0.0f;
        const u32 index = device::read_once(static_cast<u32>(args.plan.table[u64{row} * me.per_node + d]));
        if (index - near[d].first < near[d].rows) return near[d].weights[u64{index} * topk + k];
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(me.near(d)), near[d].rows, index);
        return 0.0f;
    }
    // A warp, after the barrier that follows the list: sums the weights of `count` summands in their order. Those in
    // [begin, end) are the rows of the node row at `row` in the table.
    DEEP_EP_DEVICE void sum_weights(u32 row, u32 begin, u32 end, u32 count, float* to) const {
        const bool held = args.plan.holders != nullptr;
        for (u32 k = device::lane(); k < topk; k += device::kWarpSize) {
            float sum = held && begin < end ? held_weight(row, k) : 0.0f;
            for (u32 i = 0; i < count; ++i) {
                if (!held || i < begin || i >= end) sum += into.weights[i][k];
            }
            to[k] = sum;
        }
    }
    // One thread: gives the local chunks of a chunk back to their producers. `owner` is the rank whose rows they hold.
    DEEP_EP_DEVICE void give_back(u32 chunk, u32 chunks, u32 owner) const {
        if (chunk + wire::kLocalSlots >= chunks) return;  // the last one is not given back
        for (u32 d = 0; d < me.per_node; ++d) {
            if (sends(d)) op.signal_for(me.near(d), local_word(wire::kStreamNext, 0, chunk), owner);
        }
    }
};

}  // namespace deep_ep::two_hops
