// combine: the row streams of dispatch in reverse. Forwarders sum the rows inside their node and send one row for each
// node row; owners sum over nodes. docs/two_hops.md has the steps, the order of summation, and which waits depend on
// which.
#pragma once

#include "kernels/two_hops/own_sums.h"

namespace deep_ep::two_hops {

// Local chunks go to forwarders other than this rank, if its rows are not published.
DEEP_EP_DEVICE bool sends_local_chunks(const CombineArgs& args, const Place& me, u32 owner) {
    return args.offer.visible == 0 && me.has_local_stream(owner);
}

// The work of polling warps, for serve(): an entry for each slot of each row stream that this rank forwards, and for
// each slot of the local chunks that it sends.
template <class Shape>
struct ReturnWork {
    const CombineArgs& args;
    Operation& op;
    Shape shape;
    Place me;
    const CombineTables& tables;
    const Gatherer& rows;

    DEEP_EP_DEVICE u32 forwards() const {
        return CombineShared::forwarding(op.ranks(), me.per_node, args.layout.roles);
    }
    DEEP_EP_DEVICE u32 entries() const { return forwards() + CombineShared::sending(op.ranks()); }
    DEEP_EP_DEVICE u32 line(u32 entry) const { return args.layout.line_at(entry / wire::kSlots, me.node); }
    DEEP_EP_DEVICE bool sends_to(u32 owner) const { return sends_local_chunks(args, me, owner); }

    DEEP_EP_DEVICE_CALL u32 steps(u32 entry) const {
        const wire::TwoHopLayout& layout = args.layout;
        if (entry < forwards()) {
            return chunks_in_slot(tables.streams[line(entry)].forwarded_chunks, entry % wire::kSlots);
        }
        const u32 owner = (entry - forwards()) / wire::kLocalSlots;
        if (!sends_to(owner)) return 0;
        return chunks_in_slot(layout.chunks(tables.received[owner].node_rows), (entry - forwards()) % wire::kLocalSlots,
                              wire::kLocalSlots);
    }
    DEEP_EP_DEVICE_CALL Pending blocked(u32 entry, u32 n) const {
        if (entry >= forwards()) {
            const u32 local = entry - forwards(), owner = local / wire::kLocalSlots;
            const Pending next = Pending::of(op, Phase::kNext, me.near_forwarder(owner),
                                             local_word(wire::kStreamNext, 0, local), owner, n);
            return next.over() ? Pending::none() : next;
        }
        const u32 slot = entry % wire::kSlots, of = line(entry), owner = me.origin(of);
        const Pending next = Pending::of(op, Phase::kNext, owner, wire::kNext + slot, owner, n);
        if (!next.over()) return next;
        for (u32 d = 0; d < me.per_node; ++d) {
            if (!rows.sends(d)) continue;
            const Pending chunk = rows.local_chunk(of, slot + n * wire::kSlots, d);
            if (!chunk.over()) return chunk;
        }
        return Pending::none();
    }
    DEEP_EP_DEVICE void step(u32 entry, u32 n) const {
        if (entry < forwards()) {
            return_chunk(line(entry), entry % wire::kSlots + n * wire::kSlots);
        } else {
            const u32 local = entry - forwards();
            send_local_chunk(local / wire::kLocalSlots, local % wire::kLocalSlots + n * wire::kLocalSlots);
        }
    }
    DEEP_EP_DEVICE bool fill_in() const { return false; }

  private:
    // Where chunk `chunk` of a line is returned to, and the slot here in which it is built for an owner that is not
    // mapped.
    struct Return {
        u32 owner;
        u64 source, target;
    };
    DEEP_EP_DEVICE Return way_back(u32 line, u32 chunk) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 slot = chunk % wire::kSlots, to = layout.node_of(line);
        const u32 place = layout.place(layout.role_of(line), to, me.node);
        return {me.origin(line), op.region_offset() + layout.rail_chunk_send(place, slot),
                op.region_offset() + layout.rail_chunk(layout.place(me.node, to), slot)};
    }
    // A warp: builds a chunk of sums. Returns false if the operation fails.
    DEEP_EP_DEVICE bool sum_chunk(u32 line, u32 chunk) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 count = layout.rows_of_chunk(chunk, tables.streams[line].forwarded);
        if (!rows.find(line, chunk)) return false;
        const Return way = way_back(line, chunk);
        u8* const message = chunk_to_send(op, way.owner, way.source, way.target);
        if (device::lane() == 0) store_chunk_header(op, message, chunk * layout.chunk_rows, count);
        for (u32 i = 0; i < count; ++i) {
            const u32 row = tables.streams[line].begin + chunk * layout.chunk_rows + i;
            const u32 summands = rows.list(row, 0);
            __syncwarp();  // the list is complete
            sum_rows(shape, message + layout.rail.x_offset() + u64{i} * shape.row_bytes(), rows.into, summands, nullptr,
                     nullptr);
            if (carries_weights(args)) {
                auto* const weights = reinterpret_cast<float*>(message + layout.rail.topk_weights_offset(count));
                rows.sum_weights(row, 0, summands, summands, weights + i * shape.topk());
            }
            __syncwarp();  // the list has been read
        }
        return true;
    }
    // A warp: sums the rows of a chunk and sends it to its owner.
    DEEP_EP_DEVICE_CALL void return_chunk(u32 line, u32 chunk) const {
        if (!sum_chunk(line, chunk)) return;
        // The owner is notified late of a failure in another node. Therefore sums of published rows are sent only if
        // this rank has not been notified of a failure: after a failure, kernels of the failed rank may already
        // overwrite these rows.
        __syncwarp();  // all lanes' loads precede lane 0's last look
        if (!broadcast(device::lane() != 0 || op.looks_clear())) return;
        const wire::TwoHopLayout& layout = args.layout;
        const u32 node_rows = tables.streams[line].forwarded;
        const Return way = way_back(line, chunk);
        if (device::lane() == 0) rows.give_back(chunk, layout.chunks(node_rows), way.owner);
        send_chunk(op, way.owner, chunk % wire::kSlots, way.source, way.target,
                   layout.rail_bytes(layout.rows_of_chunk(chunk, node_rows)));
    }
    // Index, among the owner's rows here, of the first one whose node row is not before `node_row`.
    DEEP_EP_DEVICE u32 first_row(u32 owner, u32 node_row) const {
        u32 low = tables.received[owner].first, high = low + tables.received[owner].rows;
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if (static_cast<u32>(args.source[middle].node_row) < node_row)
                low = middle + 1;
            else
                high = middle;
        }
        return low - tables.received[owner].first;
    }
    // A warp: sends this rank's rows that belong to chunk `chunk` of the owner's row stream to its forwarder in this
    // node.
    DEEP_EP_DEVICE_CALL void send_local_chunk(u32 owner, u32 chunk) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 row_bytes = shape.row_bytes(), topk = shape.topk(), slot = chunk % wire::kLocalSlots;
        const u32 forwarder = me.near_forwarder(owner), role = me.role(forwarder, owner);
        const u32 stream = Place::stream(owner / me.per_node, me.local, me.per_node);
        u32 first = 0, count = 0;
        if (device::lane() == 0) {
            first = first_row(owner, chunk * layout.chunk_rows);
            count = first_row(owner, (chunk + 1) * layout.chunk_rows) - first;
            if (count > layout.chunk_rows) {
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(owner), layout.chunk_rows, count);
            }
        }
        first = __shfl_sync(device::kFullMask, first, 0);
        count = __shfl_sync(device::kFullMask, count, 0);
        if (count > layout.chunk_rows) return;
        u8* const message =
            fabric::address(op.peers(), forwarder, op.region_offset() + layout.local_chunk(stream, slot, role));
        if (device::lane() == 0) store_chunk_header(op, message, first, count);
        const u64 row = u64{tables.received[owner].first} + first;
        device::warp_copy(message + layout.local.x_offset(), args.x + row * row_bytes, u64{count} * row_bytes);
        auto* const weights = reinterpret_cast<float*>(message + layout.local.topk_weights_offset(count));
        for (u32 i = device::lane(); carries_weights(args) && i < count * topk; i += device::kWarpSize) {
            weights[i] = args.topk_weights[row * topk + i];
        }
        __syncwarp();  // all lanes' stores into the forwarder's slot come before lane 0's release
        if (device::lane() == 0) op.signal_for(forwarder, local_word(wire::kStreamChunk, role, chunk), stream);
    }
};

// The block: finds what the ranks of the node publish, and where the rows of this rank's row streams are there.
DEEP_EP_DEVICE_CALL bool find_published(const CombineArgs& args, Operation& op, const Place& me,
                                        const CombineTables& tables) {
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
        // Nothing is read from a rank that is left out, and nothing waits for it.
        tables.published[d] = {op.peers().local, nullptr};
        if (!me.has(d)) continue;
        wire::Offer offer;
        const bool visible = await_offer(args.layout, args.layout.local, op, me, d, args.rows, offer,
                                         tables.ranges + d * args.layout.lines());
        tables.published[d] = {};
        if (d == me.local) {
            // A rank reads its own rows in place. If it has none, nothing is read at this address.
            tables.published[d] = {args.x != nullptr ? args.x : op.peers().local, args.topk_weights};
        } else if (visible) {
            const u8* const heap = fabric::address(op.peers(), me.near(d), 0);
            tables.published[d] = {heap + offer.x, reinterpret_cast<const float*>(heap + offer.topk_weights)};
        }
    }
    return op.sync_block();
}

// The summing warps, the first `summers` of each block. A warp's gathering state is in its own memory, and the loops of
// the other warps below keep little more than its address: a sum takes nearly all registers.
template <class Shape>
DEEP_EP_DEVICE_CALL void sum_all(const Gatherer& rows, u32 summers) {
    bool staged = false;
    for (u32 d = 0; d < rows.me.per_node; ++d) staged = staged || rows.sends(d);
    const OwnerSums<Shape> sums{rows.args, rows.op, Shape::of(rows.args.shape), rows.me, rows.tables, rows, staged};
    sums.run(blockIdx.x * summers + device::warp(), gridDim.x * summers);
}

// The other warps.
template <class Shape>
DEEP_EP_DEVICE_CALL void return_all(const Gatherer& rows, u32* done, u32 summers) {
    const u32 returners = device::warps() - summers;
    const ReturnWork<Shape> work{rows.args, rows.op, Shape::of(rows.args.shape), rows.me, rows.tables, rows};
    const Share share{done, blockIdx.x * returners + device::warp() - summers, gridDim.x * returners};
    serve(rows.op, work, share);
}

// One block, once all have done their parts: waits for the chunk of each row stream without node rows. No token waits
// for that chunk, but until it has arrived, something is in transit to this region (P4).
DEEP_EP_DEVICE void await_empty_streams(const CombineArgs& args, Operation& op, const Place& me,
                                        const CombineTables& tables) {
    for (u32 node = threadIdx.x; node < args.layout.nodes; node += blockDim.x) {
        if (tables.streams[node].sent != 0 || tables.streams[node].sent_chunks == 0) continue;
        if (node != me.node) {
            op.wait_signal(Phase::kChunk, wire::kChunk, me.forwarder(node), 1);
            continue;
        }
        for (u32 d = 0; d < me.per_node; ++d) {
            if (tables.published[d].x == nullptr) op.wait_signal(Phase::kChunk, wire::kStreamChunk, me.near(d), 1);
        }
    }
}

// The same block: ends this operation's use of its words and counters.
DEEP_EP_DEVICE void consume_combine(const CombineArgs& args, Operation& op, const Place& me,
                                    const CombineTables& tables) {
    const wire::TwoHopLayout& layout = args.layout;
    for (u32 line = threadIdx.x; line < layout.lines(); line += blockDim.x) {
        const u32 sent = tables.streams[line].sent_chunks, forwarded = tables.streams[line].forwarded_chunks;
        const u32 node = layout.node_of(line), role = layout.role_of(line);
        for (u32 slot = 0; slot < wire::kSlots; ++slot) {
            if (role == 0) op.slots_read()[node * wire::kSlots + slot] = 0;
            if (line == me.node) continue;
            if (sent != 0) op.consume(wire::kChunk + slot, me.forwarder(node), chunks_in_slot(sent, slot));
            if (forwarded != 0) {
                op.consume(wire::kNext + slot, me.origin(line), slots_given_back(forwarded, slot, wire::kSlots));
            }
        }
        for (u32 d = 0; forwarded != 0 && d < me.per_node; ++d) {
            for (u32 slot = 0; tables.published[d].x == nullptr && slot < wire::kLocalSlots; ++slot) {
                op.consume(local_word(wire::kStreamChunk, role, slot), Place::stream(node, d, me.per_node),
                           chunks_in_slot(forwarded, slot, wire::kLocalSlots));
            }
        }
    }
    for (u32 s = threadIdx.x; s < op.ranks(); s += blockDim.x) {
        const u32 chunks = layout.chunks(tables.received[s].node_rows);
        for (u32 slot = 0; sends_local_chunks(args, me, s) && slot < wire::kLocalSlots; ++slot) {
            op.consume(local_word(wire::kStreamNext, 0, slot), s, slots_given_back(chunks, slot, wire::kLocalSlots));
        }
    }
}

// The same block: signals what has been read in place, and waits for the same from its readers.
DEEP_EP_DEVICE_CALL void end_combine(const CombineArgs& args, Operation& op, const Place& me,
                                     const CombineTables& tables) {
    const auto publishes = [&](u32 reader) { return args.offer.visible != 0 && reader != me.local && me.has(reader); };
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
        if (d != me.local && me.has(d) && tables.published[d].x != nullptr) op.signal(me.near(d), wire::kRead);
    }
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
        if (publishes(d)) op.wait_signal(Phase::kRead, wire::kRead, me.near(d), 1);
    }
    await_empty_streams(args, op, me, tables);
    if (!op.sync_block()) return;
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
        if (me.has(d)) op.consume(wire::kOffer, me.near(d), 1);
        if (publishes(d)) op.consume(wire::kRead, me.near(d), 1);
    }
    consume_combine(args, op, me, tables);
    op.finish(true);
}

// Works with any grid size. Blocks need at least two warps: half of them sum this rank's tokens, the others poll.
template <class Shape>
DEEP_EP_KERNEL void combine(DEEP_EP_ARGUMENT const CombineArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    const auto shape = Shape::of(args.shape);
    if (!op.enter_and_begin(wire::Kind::kCombine, args.arguments, shape.ranks())) return;
    if (threadIdx.x == 0) check_roles(op, args.layout);
    const u32 ranks = shape.ranks(), per_node = args.layout.per_node, warps = device::warps();
    const Place me = Place::of(op.rank(), args.layout, op.environment().mask);
    const CombineShared at({ranks, 0, shape.topk(), warps, 0, per_node});
    const CombineTables tables{at.published.in(shared), at.ranges.in(shared), at.received.in(shared),
                               at.streams.in(shared)};

    find_received(op, args.plan, args.rows, tables.received);
    find_streams(op, args.plan, args.layout, me, args.tokens, tables.streams);
    if (!op.sync_block()) return;
    if (blockIdx.x == 0) send_offers(args.layout, args.offer, tables.received, op, me);
    if (!find_published(args, op, me, tables)) return;
    op.ended(Stage::kOffers);

    const u32 summers = warps - warps / 2, summands = device::warp() * CombineShared::summands(ranks, per_node);
    const Gatherer rows{args,
                        op,
                        me,
                        shape.row_bytes(),
                        shape.topk(),
                        tables,
                        at.near.in(shared) + device::warp() * per_node,
                        {at.row_x.in(shared) + summands, at.row_weights.in(shared) + summands}};
    if (device::warp() < summers) {
        sum_all<Shape>(rows, summers);
        op.ended(Stage::kSum);
    } else {
        return_all<Shape>(rows, at.done.in(shared), summers);
        op.ended(Stage::kServe);
    }
    if (op.last_to_finish()) end_combine(args, op, me, tables);
}

struct CombineKernel {
    static constexpr const char* kName = "two_hops_combine";
    using Args = CombineArgs;
    template <class Shape>
    static constexpr auto kEntry = combine<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return CombineShared(block).bytes; }
};

}  // namespace deep_ep::two_hops
