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
    const Place& me;
    const DispatchTables& tables;
    u8** row_addresses;
    u32* row_ranks;
    u32* row_numbers;
    u32* next_rows;
    u32* first_rows;
    u32* chunk_rows;

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

    // Each warp of a block: copies its part of `rows` node rows of a line, the row stream of `origin`, into all outputs
    // that can be stored into and, where there are others, into the local chunks with this number. The rows start at
    // the line's `first`. Notes where each of them went.
    template <class NodeRows>
    DEEP_EP_DEVICE_CALL void store_rows(device::RowCopies& copies, const NodeRows& rows_of, const Rows& from,
                                        u32 origin, u32 line, u32 chunk, u32 first, u32 rows) const {
        const u32 per_node = me.per_node, row_bytes = shape.row_bytes(), step = device::warps();
        const u32 lanes_below = (1u << device::lane()) - 1;
        // Each lane keeps the counts of its own ranks.
        for (u32 d = device::lane(); d < per_node; d += device::kWarpSize) {
            next_rows[d] = first_rows[d] = rows != 0 ? rows_of.first_row(d) : 0;
            chunk_rows[d] = gets_local_chunks(tables, me, d) ? rows_for(rows_of, rows, d) : 0;
        }
        const auto place = [&](u32 i) { return from.x + u64{rows_of.row(i)} * row_bytes; };
        copies.read_what_came();
        if (device::warp() < rows) copies.load(place(device::warp()), row_bytes);
        for (u32 i = device::warp(), seen = 0; i < rows; seen = i, i += step) {
            if (i + step < rows) copies.load(place(i + step), row_bytes);
            u32 count = 0;
            for (u32 base = 0; base < per_node; base += device::kWarpSize) {
                const u32 d = base + device::lane();
                for (u32 j = seen; d < per_node && j < i; ++j) next_rows[d] += rows_of.is_for(j, d);
                bool goes = d < per_node && rows_of.is_for(i, d);
                const wire::StreamRows there = d < per_node ? range(d, line) : wire::StreamRows{};
                const u32 index = goes ? next_rows[d] : 0;
                if (goes && index >= there.rows) {
                    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(me.near(d)), there.rows, index);
                    goes = false;
                }
                if (d < per_node && args.first == 0) {
                    args.plan.table[u64{tables.streams[line].begin + first + i} * per_node + d] =
                        goes ? static_cast<i32>(index) : -1;
                }
                const u32 mask = __ballot_sync(device::kFullMask, goes);
                if (goes) {
                    const u32 slot = count + __popc(mask & lanes_below);
                    const bool stored = tables.targets[d].x != nullptr;
                    row_ranks[slot] = d;
                    row_numbers[slot] = stored ? there.first + index : index - first_rows[d];
                    u8* const x =
                        stored ? tables.targets[d].x : local_chunk(origin, chunk, d) + args.layout.local.x_offset();
                    row_addresses[slot] = x + u64{row_numbers[slot]} * row_bytes;
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
                const u32 d = row_ranks[k];
                const RowTargets to = tables.targets[d].x != nullptr
                                          ? tables.targets[d]
                                          : targets_in(local_chunk(origin, chunk, d), args.layout.local, chunk_rows[d],
                                                       args.from.topk_idx.id_bytes);
                store_parts(from, row, carries_source(args) ? rows_of.token(i) : 0, first + i, d, to, row_numbers[k]);
            }
            __syncwarp();  // the list has been read
        }
        copies.finish();
    }

    // The first warp, once all parts of store_rows() are complete: sends the local chunks, each lane those to its own
    // ranks.
    template <class NodeRows>
    DEEP_EP_DEVICE void send_local_chunks(const NodeRows& rows_of, u32 origin, u32 line, u32 chunk, u32 rows) const {
        for (u32 d = device::lane(); d < me.per_node; d += device::kWarpSize) {
            if (!gets_local_chunks(tables, me, d)) continue;
            const u32 count = rows_for(rows_of, rows, d), first = count != 0 ? rows_of.first_row(d) : 0;
            const wire::StreamRows there = range(d, line);
            if (u64{first} + count > there.rows) {
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(me.near(d)), there.rows, u64{first} + count);
                continue;
            }
            store_chunk_header(op, local_chunk(origin, chunk, d), first, count);
            // All threads' stores into the receiver's slot come before this lane's release.
            op.signal_for(me.near(d), local_word(wire::kStreamChunk, 0, chunk), origin);
        }
    }

  private:
    template <class NodeRows>
    DEEP_EP_DEVICE static u32 rows_for(const NodeRows& rows_of, u32 rows, u32 local) {
        u32 count = 0;
        for (u32 i = 0; i < rows; ++i) count += rows_of.is_for(i, local);
        return count;
    }
    DEEP_EP_DEVICE u8* local_chunk(u32 origin, u32 chunk, u32 local) const {
        return fabric::address(op.peers(), me.near(local),
                               op.region_offset() + args.layout.local_chunk(origin, chunk % wire::kLocalSlots));
    }
};

}  // namespace deep_ep::two_hops
