// The last step of a combine: an owner sums the rows that have arrived for each of its tokens.
#pragma once

#include "kernels/two_hops/gather.h"

namespace deep_ep::two_hops {

// An owner sums windows of tokens, each block every gridDim-th one, once all their chunks have arrived. The rows of a
// window are in no more chunks of a row stream than it has slots: otherwise it would wait for a chunk whose slot only
// the window itself can give back. See docs/two_hops.md.
template <class Shape>
struct OwnerSums {
    const CombineArgs& args;
    Operation& op;
    Shape shape;
    const Place& me;
    const CombineTables& tables;
    const Gatherer& rows;
    device::RowSums& sums;
    bool staged;           // some rank of the node sends its rows in local chunks
    NeededChunks* needed;  // by node; the first warp's

    // Tokens of a window. More than two for each warp would only wait longer.
    DEEP_EP_DEVICE u32 window() const {
        const u32 slots = staged ? wire::kLocalSlots : wire::kSlots, most = (slots - 1) * args.layout.chunk_rows + 1;
        const u32 share = max(1u, wire::ceil_div(args.tokens, gridDim.x));
        return min(min(share, 2 * device::warps()), most);
    }
    DEEP_EP_DEVICE u32 windows() const { return wire::ceil_div(args.tokens, window()); }

    DEEP_EP_DEVICE u32 chunk_of(u32 node_row) const { return node_row / args.layout.chunk_rows; }
    // Index of a token's node row in the row stream from a node, checked against its bounds; -1 if there is none.
    DEEP_EP_DEVICE i32 node_row(u32 token, u32 node) const {
        const auto* const table = const_cast<const volatile i32*>(args.plan.node_row);
        const i32 row = table[u64{token} * args.layout.nodes + node];
        if (row < 0 || static_cast<u32>(row) < tables.streams[node].sent) return row;
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(node), tables.streams[node].sent,
                static_cast<u32>(row));
        return -1;
    }
    DEEP_EP_DEVICE const u8* message(u32 node, u32 chunk) const {
        return op.local_region() + args.layout.rail_chunk(args.layout.place(node, me.node), chunk % wire::kSlots);
    }

    // The first warp: finds which chunks hold the rows of a window's tokens. Node rows are numbered in token order.
    DEEP_EP_DEVICE void find_needed(u32 number) const {
        const u32 begin = number * window(), end = min(begin + window(), args.tokens);
        for (u32 node = 0; node < args.layout.nodes; ++node) {
            u32 first = 0, count = 0;
            for (u32 base = begin; base < end; base += device::kWarpSize) {
                const u32 token = base + device::lane();
                const i32 row = token < end ? node_row(token, node) : -1;
                const u32 mask = __ballot_sync(device::kFullMask, row >= 0);
                if (mask == 0) continue;
                if (count == 0)
                    first = static_cast<u32>(__shfl_sync(device::kFullMask, row, __ffs(static_cast<int>(mask)) - 1));
                count += __popc(mask);
            }
            if (device::lane() != 0) continue;
            needed[node] = {chunk_of(first), count == 0 ? 0 : chunk_of(first + count - 1) - chunk_of(first) + 1};
        }
        __syncwarp();  // what lane 0 has stored is visible
    }
    // Calls `use` with each chunk that the window waits for, until it returns false.
    template <class Use>
    DEEP_EP_DEVICE void each_needed(Use use) const {
        for (u32 node = 0; node < args.layout.nodes; ++node) {
            const NeededChunks chunks = needed[node];
            for (u32 chunk = chunks.first; chunk < chunks.first + chunks.count; ++chunk) {
                if (node != me.node) {
                    if (!use(rail_chunk(node, chunk), node, chunk)) return;
                    continue;
                }
                for (u32 d = 0; staged && d < me.per_node; ++d) {
                    if (rows.sends(d) && !use(rows.local_chunk(node, chunk, d), node, chunk)) return;
                }
            }
        }
    }
    // One thread: what the window that has been found still waits for.
    DEEP_EP_DEVICE Pending blocked() const {
        Pending missing = Pending::none();
        each_needed([&](const Pending& pending, u32, u32) {
            if (!pending.looks_over()) missing = pending;
            return missing.word == nullptr;
        });
        return missing;
    }
    // One thread: acquires the window's chunks, and checks those from other nodes.
    DEEP_EP_DEVICE bool open() const {
        bool fits = true;
        each_needed([&](const Pending& pending, u32 node, u32 chunk) {
            pending.acquire();
            fits = node == me.node || came_as_due(node, chunk);
            return fits;
        });
        return fits;
    }
    DEEP_EP_DEVICE Pending rail_chunk(u32 node, u32 chunk) const {
        const u32 from = me.forwarder(node);
        return Pending::of(op, Phase::kChunk, from, wire::kChunk + chunk % wire::kSlots, from,
                           chunk / wire::kSlots + 1);
    }
    DEEP_EP_DEVICE bool came_as_due(u32 node, u32 chunk) const {
        const u32 from = me.forwarder(node);
        const auto header = copy_once<wire::ChunkHeader>(message(node, chunk));
        if (!op.check_message(Phase::kChunk, from, header.operation, header.arguments)) return false;
        const u32 first = chunk * args.layout.chunk_rows,
                  due = args.layout.rows_of_chunk(chunk, tables.streams[node].sent);
        if (header.first == first && header.rows == due) return true;
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from), u64{first} << 32 | due,
                u64{header.first} << 32 | header.rows);
        return false;
    }
    // A warp: appends a token's rows from nodes [begin, end), which exclude the own node, after `count` summands.
    DEEP_EP_DEVICE u32 list_nodes(u32 token, u32 begin, u32 end, u32 count) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 lanes_below = (1u << device::lane()) - 1;
        for (u32 base = begin; base < end; base += device::kWarpSize) {
            const u32 node = base + device::lane();
            const i32 row = node < end ? node_row(token, node) : -1;
            const u32 mask = __ballot_sync(device::kFullMask, row >= 0);
            if (row >= 0) {
                const u32 chunk = chunk_of(static_cast<u32>(row)), slot = count + __popc(mask & lanes_below);
                const u32 at = static_cast<u32>(row) - chunk * layout.chunk_rows;
                const u32 of_chunk = layout.rows_of_chunk(chunk, tables.streams[node].sent);
                const u8* const parts = message(node, chunk);
                rows.into.x[slot] = parts + layout.rail.x_offset() + u64{at} * shape.row_bytes();
                rows.into.weights[slot] =
                    reinterpret_cast<const float*>(parts + layout.rail.topk_weights_offset(of_chunk)) +
                    u64{at} * shape.topk();
            }
            count += __popc(mask);
        }
        return count;
    }
    // A warp: sums ((0 + node 0) + node 1 ...), with the rows of the own node's ranks one by one, then adds the biases.
    DEEP_EP_DEVICE void sum_token(u32 token) const {
        const u32 row_bytes = shape.row_bytes(), topk = shape.topk();
        const i32 own = __shfl_sync(device::kFullMask, device::lane() == 0 ? node_row(token, me.node) : 0, 0);
        const u32 before = list_nodes(token, 0, me.node, 0);
        u32 own_row = 0, end = before;
        if (own >= 0) {
            own_row = tables.streams[me.node].begin + static_cast<u32>(own);
            if (!rows.find(me.node, chunk_of(static_cast<u32>(own)))) return;
            end = rows.list(own_row, before);
        }
        const u32 count = list_nodes(token, me.node + 1, args.layout.nodes, end);
        __syncwarp();  // the list is complete
        const u64 offset = u64{token} * row_bytes;
        sum_rows(sums, args.combined_x + offset, rows.into, count,
                 args.bias[0] != nullptr ? args.bias[0] + offset : nullptr,
                 args.bias[1] != nullptr ? args.bias[1] + offset : nullptr, row_bytes);
        if (carries_weights(args)) {
            rows.sum_weights(own_row, before, end, count, args.combined_weights + u64{token} * topk);
        }
    }
    // One thread, after its warp's loads: counts one more summed row of a chunk. The thread that counts the last one
    // gives the slot back: its release is ordered after those of all threads that have counted (P6). Litmus:
    // count_by_atomics.
    DEEP_EP_DEVICE void count_row(u32 node, u32 node_row) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 chunk = chunk_of(node_row), chunks = tables.streams[node].sent_chunks;
        const bool own = node == me.node;
        const u32 slot = chunk % (own ? wire::kLocalSlots : wire::kSlots);
        u32* const counter = op.slots_read() + node * wire::kSlots + slot;
        // Every chunk of a slot is full, except a row stream's last one.
        if ((device::fetch_add_acq_rel<Scope::kDevice>(counter, 1u) + 1) % layout.chunk_rows != 0) return;
        if (own) {
            rows.give_back(chunk, chunks, op.rank());
        } else if (chunk + wire::kSlots < chunks) {
            op.signal(me.forwarder(node), wire::kNext + slot);
        }
    }
    // Each warp of a block: sums its part of a window.
    DEEP_EP_DEVICE_CALL void sum(u32 number) const {
        const u32 begin = number * window(), end = min(begin + window(), args.tokens);
        for (u32 token = begin + device::warp(); token < end; token += device::warps()) {
            sum_token(token);
            __syncwarp();  // all lanes have read the rows before any of them is given back
            for (u32 node = device::lane(); node < args.layout.nodes; node += device::kWarpSize) {
                const i32 row = node_row(token, node);
                if (row >= 0 && (node != me.node || staged)) count_row(node, static_cast<u32>(row));
            }
        }
    }
};

}  // namespace deep_ep::two_hops
