// combine: the streams of dispatch backwards. Forwarders sum the rows inside their node and send one row for each node
// row; owners sum over nodes. docs/two_hops.md has the steps, the order of summation, and who waits for whom.
#pragma once

#include "kernels/two_hops/own_sums.h"

namespace deep_ep::two_hops {

// What polling warps do, for serve(): an entry for each slot of each stream that this rank forwards, and for each slot
// of the local chunks that it sends.
template <class Shape>
struct ReturnWork {
    const CombineArgs& args;
    Operation& op;
    Shape shape;
    Place me;
    const Stream* streams;
    const Received* received;
    const Gatherer& rows;

    DEEP_EP_DEVICE u32 forwards() const { return CombineShared::forwarding(op.ranks(), me.per_node); }
    DEEP_EP_DEVICE u32 entries() const { return forwards() + CombineShared::sending(op.ranks()); }
    DEEP_EP_DEVICE u32 node(u32 entry) const { return args.layout.node_at(entry / wire::kSlots, me.node); }
    // Local chunks go to other forwarders than this rank, where its rows are not published.
    DEEP_EP_DEVICE bool sends_to(u32 owner) const {
        return args.offer.visible == 0 && owner % me.per_node != me.local;
    }

    DEEP_EP_DEVICE u32 steps(u32 entry) const {
        const wire::TwoHopLayout& layout = args.layout;
        if (entry < forwards()) {
            return chunks_in_slot(layout.chunks(streams[node(entry)].forwarded), entry % wire::kSlots);
        }
        const u32 owner = (entry - forwards()) / wire::kLocalSlots;
        if (!sends_to(owner)) return 0;
        return chunks_in_slot(layout.chunks(received[owner].node_rows), (entry - forwards()) % wire::kLocalSlots,
                              wire::kLocalSlots);
    }
    DEEP_EP_DEVICE_CALL Pending blocked(u32 entry, u32 n) const {
        if (entry >= forwards()) {
            const u32 local = entry - forwards(), owner = local / wire::kLocalSlots;
            const Pending next = Pending::of(op, Phase::kNext, me.near(owner % me.per_node),
                                             wire::kNext + local % wire::kLocalSlots, owner, n);
            return next.over() ? Pending::none() : next;
        }
        const u32 slot = entry % wire::kSlots, to = node(entry), owner = me.rail(to);
        const Pending next = Pending::of(op, Phase::kNext, owner, wire::kNext + slot, owner, n);
        if (!next.over()) return next;
        for (u32 d = 0; d < me.per_node; ++d) {
            if (!rows.sends(d)) continue;
            const Pending chunk = rows.local_chunk(to, slot + n * wire::kSlots, d);
            if (!chunk.over()) return chunk;
        }
        return Pending::none();
    }
    DEEP_EP_DEVICE void step(u32 entry, u32 n) const {
        if (entry < forwards()) {
            return_chunk(node(entry), entry % wire::kSlots + n * wire::kSlots);
        } else {
            const u32 local = entry - forwards();
            send_local_chunk(local / wire::kLocalSlots, local % wire::kLocalSlots + n * wire::kLocalSlots);
        }
    }
    DEEP_EP_DEVICE bool fill_in() const { return false; }

  private:
    // A warp: sums the rows of chunk `chunk` of the stream to `to` and sends it.
    DEEP_EP_DEVICE_CALL void return_chunk(u32 to, u32 chunk) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 slot = chunk % wire::kSlots, owner = me.rail(to), node_rows = streams[to].forwarded;
        const u32 first = chunk * layout.chunk_rows, count = layout.rows_of_chunk(chunk, node_rows);
        const u32 row_bytes = shape.row_bytes(), topk = shape.topk();
        const u64 source = op.region_offset() + layout.rail_chunk_send(layout.place(to, me.node), slot);
        const u64 target = op.region_offset() + layout.rail_chunk(layout.place(me.node, to), slot);
        u8* const message =
            fabric::mapped(op.peers(), owner) ? fabric::address(op.peers(), owner, target) : op.peers().local + source;
        if (!rows.find(to, chunk)) return;
        __syncwarp();  // all lanes' finds come before their use by others
        if (device::lane() == 0) store_chunk_header(op, message, first, count);
        auto* const weights = reinterpret_cast<float*>(message + layout.rail.topk_weights_offset(count));
        for (u32 i = 0; i < count; ++i) {
            const u32 summands = rows.list(streams[to].begin + first + i, 0);
            __syncwarp();  // the list is complete
            device::warp_sum_bf16(message + layout.rail.x_offset() + u64{i} * row_bytes, rows.into.x, summands, nullptr,
                                  nullptr, row_bytes / static_cast<u32>(sizeof(u16)));
            if (carries_weights(args)) sum_weights(rows.into, summands, topk, weights + i * topk);
            __syncwarp();  // the list has been read
        }
        if (device::lane() == 0) rows.give_back(chunk, layout.chunks(node_rows), owner);
        if (fabric::mapped(op.peers(), owner)) {
            if (device::lane() == 0) op.signal(owner, wire::kChunk + slot);  // behind the last __syncwarp
        } else {
            const fabric::Piece piece{source, target, layout.rail_bytes(count)};
            op.put_signal(owner, wire::kChunk + slot, &piece, 1);
        }
    }
    // The first of owner's rows here whose node row is not before `node_row`, counted among them.
    DEEP_EP_DEVICE u32 first_row(u32 owner, u32 node_row) const {
        u32 low = received[owner].first, high = low + received[owner].rows;
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if (static_cast<u32>(args.source[middle].node_row) < node_row)
                low = middle + 1;
            else
                high = middle;
        }
        return low - received[owner].first;
    }
    // A warp: this rank's rows that belong to chunk `chunk` of owner's stream, to its forwarder in this node.
    DEEP_EP_DEVICE_CALL void send_local_chunk(u32 owner, u32 chunk) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 row_bytes = shape.row_bytes(), topk = shape.topk(), slot = chunk % wire::kLocalSlots;
        const u32 forwarder = me.near(owner % me.per_node);
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
            fabric::address(op.peers(), forwarder, op.region_offset() + layout.local_chunk(stream, slot));
        if (device::lane() == 0) store_chunk_header(op, message, first, count);
        const u64 row = u64{received[owner].first} + first;
        device::warp_copy(message + layout.local.x_offset(), args.x + row * row_bytes, u64{count} * row_bytes);
        auto* const weights = reinterpret_cast<float*>(message + layout.local.topk_weights_offset(count));
        for (u32 i = device::lane(); carries_weights(args) && i < count * topk; i += device::kWarpSize) {
            weights[i] = args.topk_weights[row * topk + i];
        }
        __syncwarp();  // all lanes' stores into the forwarder's slot come before lane 0's release
        if (device::lane() == 0) op.signal_for(forwarder, wire::kChunk + slot, stream);
    }
};

// The block: what the ranks of the node publish, and where there the rows of this rank's streams lie.
DEEP_EP_DEVICE bool find_published(const CombineArgs& args, Operation& op, const Place& me, Published* published,
                                   wire::StreamRows* ranges) {
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
        wire::Offer offer;
        const bool visible =
            await_offer(args.layout, args.layout.local, op, me, d, offer, ranges + d * args.layout.nodes);
        published[d] = {};
        if (d == me.local) {
            // A rank reads its own rows where they are; of none it reads nothing.
            published[d] = {args.x != nullptr ? args.x : op.peers().local, args.topk_weights};
        } else if (visible) {
            const u8* const heap = fabric::address(op.peers(), me.near(d), 0);
            published[d] = {heap + offer.x, reinterpret_cast<const float*>(heap + offer.topk_weights)};
        }
    }
    return op.meet();
}

// One block, when all have done their parts: what has been read in place is signalled, and waited for.
template <class Shape>
DEEP_EP_DEVICE_CALL void end_combine(const CombineArgs& args, Operation& op, const Place& me,
                                const ReturnWork<Shape>& work) {
    const wire::TwoHopLayout& layout = args.layout;
    const auto publishes = [&](u32 reader) { return args.offer.visible != 0 && reader != me.local; };
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
        if (d != me.local && !work.rows.sends(d)) op.signal(me.near(d), wire::kRead);
    }
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
        if (publishes(d)) op.wait_signal(Phase::kRead, wire::kRead, me.near(d), 1);
    }
    if (!op.meet()) return;
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
        op.consume(wire::kOffer, me.near(d), 1);
        if (publishes(d)) op.consume(wire::kRead, me.near(d), 1);
    }
    const auto given_back = [](u32 steps) { return steps != 0 ? steps - 1 : 0; };  // the last one of a slot is not
    for (u32 node = threadIdx.x; node < layout.nodes; node += blockDim.x) {
        const u32 sent = layout.chunks(work.streams[node].sent);
        const u32 forwarded = node == me.node ? sent : layout.chunks(work.streams[node].forwarded);
        for (u32 slot = 0; slot < wire::kSlots; ++slot) {
            op.slots_read()[node * wire::kSlots + slot] = 0;
            if (node == me.node) continue;
            op.consume(wire::kChunk + slot, me.rail(node), chunks_in_slot(sent, slot));
            op.consume(wire::kNext + slot, me.rail(node), given_back(chunks_in_slot(forwarded, slot)));
        }
        for (u32 d = 0; d < me.per_node; ++d) {
            for (u32 slot = 0; work.rows.sends(d) && slot < wire::kLocalSlots; ++slot) {
                op.consume(wire::kChunk + slot, Place::stream(node, d, me.per_node),
                           chunks_in_slot(forwarded, slot, wire::kLocalSlots));
            }
        }
    }
    for (u32 s = threadIdx.x; s < op.ranks(); s += blockDim.x) {
        for (u32 slot = 0; work.sends_to(s) && slot < wire::kLocalSlots; ++slot) {
            op.consume(wire::kNext + slot, s,
                       given_back(chunks_in_slot(layout.chunks(work.received[s].node_rows), slot, wire::kLocalSlots)));
        }
    }
    op.finish();
}

// Any grid of at least two warps per block: half of them sum this rank's tokens, the others poll.
template <class Shape>
DEEP_EP_KERNEL void combine(DEEP_EP_ARGUMENT const CombineArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    if (!op.enter() || !op.await_free()) return;
    const auto shape = Shape::of(args.shape);
    const u32 ranks = shape.ranks(), per_node = args.layout.per_node, warps = device::warps();
    const Place me = Place::of(op.rank(), per_node);

    const CombineShared at({ranks, 0, shape.topk(), warps, 0, per_node});
    auto* const received = at.received.in(shared);
    auto* const streams = at.streams.in(shared);
    auto* const published = at.published.in(shared);
    auto* const ranges = at.ranges.in(shared);

    find_received(op, args.plan, args.rows, received);
    find_streams(op, args.plan, args.layout.nodes, me.node, args.tokens, streams);
    if (!op.meet()) return;
    if (blockIdx.x == 0) send_offers(args.layout, args.offer, received, op, me);
    if (!find_published(args, op, me, published, ranges)) return;

    const u32 summands = device::warp() * CombineShared::summands(ranks, per_node);
    const Gatherer rows{args,
                        op,
                        me,
                        shape.row_bytes(),
                        shape.topk(),
                        published,
                        ranges,
                        at.near.in(shared) + device::warp() * per_node,
                        {at.row_x.in(shared) + summands, at.row_weights.in(shared) + summands}};
    const ReturnWork<Shape> work{args, op, shape, me, streams, received, rows};
    const u32 returners = warps / 2, summers = warps - returners;
    if (device::warp() < summers) {
        bool staged = false;
        for (u32 d = 0; d < per_node; ++d) staged = staged || rows.sends(d);
        const OwnerSums<Shape> sums{args, op, shape, me, streams, rows, staged};
        sums.run(blockIdx.x * summers + device::warp(), gridDim.x * summers);
    } else {
        serve(op, work, at.done.in(shared), blockIdx.x * returners + device::warp() - summers,
              gridDim.x * returners);
    }
    if (op.last_block(kFinished)) end_combine(args, op, me, work);
}

struct CombineKernel {
    static constexpr const char* kName = "two_hop_combine";
    using Args = CombineArgs;
    template <class Shape>
    static constexpr auto kEntry = combine<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return CombineShared(block).bytes; }
};

}  // namespace deep_ep::two_hops
