// The second hop of a dispatch: node rows are read once and copied to rows of the node's ranks.
#pragma once

#include "kernels/two_hops/dispatch_args.h"

namespace deep_ep::two_hops {

// The node rows of a chunk that has arrived from another node.
struct ArrivedRows {
    const u8* message;
    const wire::TwoHopLayout& layout;
    u32 rows;

    DEEP_EP_DEVICE u32 row(u32 i) const { return i; }  // index among the rows of the chunk
    DEEP_EP_DEVICE i32 token(u32 i) const {
        return reinterpret_cast<const i32*>(message + layout.rail.src_idx_offset(rows))[i];
    }
    DEEP_EP_DEVICE bool is_for(u32 i, u32 local) const {
        const auto* const sets = reinterpret_cast<const u32*>(message + layout.sets_offset(rows));
        const u32 word = sets[i * wire::set_words(layout.per_node) + local / wire::kSetBits];
        return (word >> local % wire::kSetBits & 1) != 0;
    }
    DEEP_EP_DEVICE u32 first_row(u32 local) const {
        return reinterpret_cast<const u32*>(message + layout.firsts_offset(rows))[local];
    }
};

// Some of this rank's node rows for its own node.
struct OwnRows {
    Operation& op;
    SentRows sent;
    u32 first;

    // Index in the caller's tensors. A token out of range fails the operation and is never read.
    DEEP_EP_DEVICE u32 row(u32 i) const {
        const u32 token = static_cast<u32>(sent.token(first + i));
        if (token < sent.tokens) return token;
        op.fail(wire::kMismatch, Phase::kBounds, -1, sent.tokens, token);
        return 0;
    }
    DEEP_EP_DEVICE i32 token(u32 i) const { return sent.token(first + i); }
    DEEP_EP_DEVICE bool is_for(u32 i, u32 local) const { return sent.is_for(first + i, local); }
    DEEP_EP_DEVICE u32 first_row(u32 local) const { return sent.rows_before(first, local); }
};

// A warp's state for storing rows.
template <class Shape>
struct Forwarder {
    const DispatchArgs& args;
    Operation& op;
    Shape shape;
    Place me;
    const DispatchTables& tables;
    u8** row_addresses;
    u32* row_ranks;
    u32* row_numbers;
    u32* next_rows;

    DEEP_EP_DEVICE wire::StreamRows range(u32 local, u32 line) const {
        return tables.ranges[local * args.layout.lines() + line];
    }

    // A warp: stores the parts of a row other than x.
    DEEP_EP_DEVICE void store_parts(const Rows& from, u32 row, i32 token, u32 node_row, u32 local, const RowTargets& to,
                                    u64 at) const {
        const wire::ChunkFormat& format = args.layout.rail;
        const u32 topk = shape.topk();
        if (format.scales_bytes != 0) store_scales(from, format, row, to.scales + at * scales_per_row(format));
        if (carries_topk(args)) {
            store_topk(from, format, args.experts_per_rank, topk, row, me.near(local), to.topk_idx.from(at * topk),
                       to.topk_weights + at * topk);
        }
        if (carries_source(args) && device::lane() == 0) to.source[at] = {token, static_cast<i32>(node_row)};
    }

    // A warp: notes which rank of the node holds each choice of a node row, `at` its index in the table.
    DEEP_EP_DEVICE void note_holders(const Rows& from, u32 row, u64 at) const {
        const u32 topk = shape.topk();
        const i64 first = static_cast<i64>(me.near(0)) * args.experts_per_rank;
        for (u32 k = device::lane(); k < topk; k += device::kWarpSize) {
            const u64 expert = static_cast<u64>(from.topk_idx.get(u64{row} * topk + k) - first);
            const bool here = expert < u64{me.per_node} * args.experts_per_rank;
            args.plan.holders[at * topk + k] =
                here ? static_cast<i32>(static_cast<u32>(expert) / args.experts_per_rank) : -1;
        }
    }

    // A warp: stores `rows` node rows of a line, starting at its `first`, into all outputs that can be stored into.
    // Notes where each of them went.
    template <class NodeRows>
    DEEP_EP_DEVICE void store_rows(device::RowCopies& copies, const NodeRows& rows_of, const Rows& from, u32 line,
                                   u32 first, u32 rows) const {
        const u32 per_node = me.per_node, row_bytes = shape.row_bytes();
        const u32 lanes_below = (1u << device::lane()) - 1;
        // Each lane keeps the counts of its own ranks.
        for (u32 d = device::lane(); d < per_node; d += device::kWarpSize) next_rows[d] = rows_of.first_row(d);
        for (u32 i = 0; i < rows; ++i) {
            u32 count = 0;
            for (u32 base = 0; base < per_node; base += device::kWarpSize) {
                const u32 d = base + device::lane();
                bool goes = d < per_node && rows_of.is_for(i, d);
                const wire::StreamRows there = d < per_node ? range(d, line) : wire::StreamRows{};
                const u32 index = goes ? next_rows[d]++ : 0;
                if (goes && index >= there.rows) {
                    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(me.near(d)), there.rows, index);
                    goes = false;
                }
                if (d < per_node && args.first == 0) {
                    args.plan.table[u64{tables.streams[line].begin + first + i} * per_node + d] =
                        goes ? static_cast<i32>(index) : -1;
                }
                const bool stored = goes && tables.targets[d].x != nullptr;
                const u32 mask = __ballot_sync(device::kFullMask, stored);
                if (stored) {
                    const u32 slot = count + __popc(mask & lanes_below);
                    row_addresses[slot] = tables.targets[d].x + (u64{there.first} + index) * row_bytes;
                    row_ranks[slot] = d;
                    row_numbers[slot] = there.first + index;
                }
                count += __popc(mask);
            }
            __syncwarp();  // the list is complete
            const u32 row = rows_of.row(i);
            if (args.first == 0 && args.plan.holders != nullptr) {
                note_holders(from, row, u64{tables.streams[line].begin + first + i});
            }
            copies.to_many(row_addresses, count, from.x + u64{row} * row_bytes, row_bytes, args.streaming != 0);
            for (u32 k = 0; k < count; ++k) {
                store_parts(from, row, carries_source(args) ? rows_of.token(i) : 0, first + i, row_ranks[k],
                            tables.targets[row_ranks[k]], row_numbers[k]);
            }
            __syncwarp();  // the list has been read
        }
    }

    // A warp: sends the rows of chunk `chunk` of a line, the row stream of `origin`, to a rank whose output cannot be
    // stored into, as a local chunk.
    template <class NodeRows>
    DEEP_EP_DEVICE_CALL void send_local_chunk(const NodeRows& rows_of, const Rows& from, u32 origin, u32 line,
                                              u32 chunk, u32 rows, u32 local) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 slot = chunk % wire::kLocalSlots, row_bytes = shape.row_bytes();
        u32 count = 0;
        for (u32 base = 0; base < rows; base += device::kWarpSize) {
            const u32 i = base + device::lane();
            count += __popc(__ballot_sync(device::kFullMask, i < rows && rows_of.is_for(i, local)));
        }
        const u32 first = count != 0 ? rows_of.first_row(local) : 0;
        const wire::StreamRows there = range(local, line);
        if (u64{first} + count > there.rows) {
            op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(me.near(local)), there.rows, u64{first} + count);
            return;
        }
        u8* const message =
            fabric::address(op.peers(), me.near(local), op.region_offset() + layout.local_chunk(origin, slot));
        if (device::lane() == 0) store_chunk_header(op, message, first, count);
        const RowTargets to = targets_in(message, layout.local, count, args.from.topk_idx.id_bytes);
        u32 at = 0;
        for (u32 i = 0; i < rows && at < count; ++i) {
            if (!rows_of.is_for(i, local)) continue;
            const u32 row = rows_of.row(i);
            copy_row(shape, to.x + u64{at} * row_bytes, from.x + u64{row} * row_bytes);
            store_parts(from, row, carries_source(args) ? rows_of.token(i) : 0, chunk * layout.chunk_rows + i, local,
                        to, at);
            ++at;
        }
        __syncwarp();  // all lanes' stores into the receiver's slot come before lane 0's release
        if (device::lane() == 0) op.signal_for(me.near(local), local_word(wire::kStreamChunk, 0, chunk), origin);
    }
};

}  // namespace deep_ep::two_hops
