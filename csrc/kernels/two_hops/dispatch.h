// dispatch: every token's row crosses once to each node that holds one of its experts, and is stored there into the
// outputs of all its destination ranks. docs/two_hops.md has the steps, and which waits depend on which.
#pragma once

#include "kernels/two_hops/forward.h"

namespace deep_ep::two_hops {

// The node rows that this rank sends to other nodes, for serve(): an entry for each slot of each row stream. They wait
// only for slots.
template <class Shape>
struct SendWork {
    const DispatchArgs& args;
    Operation& op;
    Shape shape;
    Place me;
    const DispatchTables& tables;

    DEEP_EP_DEVICE u32 entries() const { return DispatchShared::sending(op.ranks(), me.per_node); }
    DEEP_EP_DEVICE u32 node(u32 entry) const { return args.layout.node_at(entry / wire::kSlots, me.node); }
    DEEP_EP_DEVICE u32 steps(u32 entry) const {
        return chunks_in_slot(tables.streams[node(entry)].sent_chunks, entry % wire::kSlots);
    }
    DEEP_EP_DEVICE Pending blocked(u32 entry, u32 n) const {
        const u32 to = me.forwarder(node(entry));
        const Pending next = Pending::of(op, Phase::kNext, to, wire::kNext + entry % wire::kSlots, to, n);
        return next.over() ? Pending::none() : next;
    }
    // Sends a chunk: unchanged node rows, with the destination ranks of each.
    DEEP_EP_DEVICE_CALL void step(u32 entry, u32 n) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 slot = entry % wire::kSlots, chunk = slot + n * wire::kSlots, to_node = node(entry);
        const u32 first = chunk * layout.chunk_rows, rows = layout.rows_of_chunk(chunk, tables.streams[to_node].sent);
        const u32 per_node = me.per_node, words = wire::set_words(per_node), topk = shape.topk();
        const u32 to = me.forwarder(to_node), row_bytes = shape.row_bytes(), role = me.role(to, op.rank());
        const u64 source = op.region_offset() + layout.rail_chunk_send(layout.place(to_node, me.node), slot);
        const u64 target = op.region_offset() + layout.rail_chunk(layout.place(role, me.node, to_node), slot);
        u8* const message = chunk_to_send(op, to, source, target);
        const OwnRows rows_of{op, {args.plan, to_node, args.tokens, per_node}, first};
        const RowTargets parts = targets_in(message, layout.rail, rows, args.from.topk_idx.id_bytes);
        auto* const tokens = reinterpret_cast<i32*>(parts.source);
        if (device::lane() == 0) store_chunk_header(op, message, first, rows);
        for (u32 i = 0; i < rows; ++i) {
            const u32 row = rows_of.row(i);
            copy_row(shape, parts.x + u64{i} * row_bytes, args.from.x + u64{row} * row_bytes);
            if (layout.rail.scales_bytes != 0) {
                store_scales(args.from, layout.rail, row, parts.scales + i * scales_per_row(layout.rail));
            }
            for (u32 k = device::lane(); carries_topk(args) && k < topk; k += device::kWarpSize) {
                const u64 from = u64{row} * topk + k;
                parts.topk_idx.set(i * topk + k, args.from.topk_idx.get(from));
                if (layout.rail.has_weights()) parts.topk_weights[i * topk + k] = args.from.topk_weights[from];
            }
        }
        for (u32 i = device::lane(); carries_source(args) && i < rows; i += device::kWarpSize) {
            tokens[i] = rows_of.token(i);
        }
        auto* const firsts = reinterpret_cast<u32*>(message + layout.firsts_offset(rows));
        auto* const sets = reinterpret_cast<u32*>(message + layout.sets_offset(rows));
        for (u32 d = device::lane(); d < per_node; d += device::kWarpSize) {
            firsts[d] = rows != 0 ? rows_of.first_row(d) : 0;
        }
        for (u32 i = device::lane(); i < rows * words; i += device::kWarpSize) {
            sets[i] = rows_of.sent.set(first)[i];
        }
        send_chunk(op, to, slot, source, target, layout.rail_bytes(rows));
    }
    DEEP_EP_DEVICE bool fill_in() const { return false; }
};

// This rank's own output is filled from local chunks by other forwarders.
DEEP_EP_DEVICE bool places_local_chunks(const DispatchArgs& args, const Place& me, u32 origin) {
    return args.offer.visible == 0 && me.has_local_stream(origin);
}
DEEP_EP_DEVICE bool gets_local_chunks(const DispatchTables& tables, const Place& me, u32 local) {
    return me.has(local) && tables.targets[local].x == nullptr;
}

// All other work: passing on what has arrived from other nodes, placing local chunks, and, when there is nothing else
// to do, storing the node rows for this rank's own node.
template <class Shape>
struct ForwardWork {
    // Node rows for the own node that are stored at a time: few, so that newly arrived rows do not wait long.
    static constexpr u32 kOwnRows = 8;

    const DispatchArgs& args;
    Operation& op;
    Forwarder<Shape> to;
    Place me;
    const DispatchTables& tables;
    device::RowCopies& copies;
    u32 own;       // this warp's next part of the node rows for the own node
    u32 own_step;  // workers

    struct Entry {
        enum Kind { kForward, kPlace, kOwn } kind;
        u32 who;  // line, origin, or local index of the receiver
        u32 slot;
    };
    DEEP_EP_DEVICE u32 entries() const { return DispatchShared::others(op.ranks(), me.per_node, args.layout.roles); }
    DEEP_EP_DEVICE Entry at(u32 entry) const {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 forwards = DispatchShared::forwarding(op.ranks(), me.per_node, layout.roles);
        if (entry < forwards)
            return {Entry::kForward, layout.line_at(entry / wire::kSlots, me.node), entry % wire::kSlots};
        entry -= forwards;
        const u32 places = DispatchShared::placing(op.ranks());
        const u32 local = entry < places ? entry : entry - places;
        return {entry < places ? Entry::kPlace : Entry::kOwn, local / wire::kLocalSlots, local % wire::kLocalSlots};
    }
    DEEP_EP_DEVICE bool places(u32 origin) const { return places_local_chunks(args, me, origin); }
    DEEP_EP_DEVICE bool gets_chunks(u32 local) const { return gets_local_chunks(tables, me, local); }

    DEEP_EP_DEVICE_CALL u32 steps(u32 entry) const {
        const Entry what = at(entry);
        const wire::TwoHopLayout& layout = args.layout;
        if (what.kind == Entry::kForward) return chunks_in_slot(tables.streams[what.who].forwarded_chunks, what.slot);
        u32 chunks = 0;
        if (what.kind == Entry::kPlace && places(what.who)) chunks = layout.chunks(tables.received[what.who].node_rows);
        if (what.kind == Entry::kOwn && gets_chunks(what.who)) chunks = tables.streams[me.node].sent_chunks;
        return chunks_in_slot(chunks, what.slot, wire::kLocalSlots);
    }
    // The slot of a local chunk, at a receiver of a line.
    DEEP_EP_DEVICE Pending local_slot(u32 line, u32 chunk, u32 local) const {
        const u32 role = args.layout.role_of(line), node = args.layout.node_of(line);
        return Pending::of(op, Phase::kNext, me.near(local), local_word(wire::kStreamNext, role, chunk),
                           Place::stream(node, local, me.per_node), chunk / wire::kLocalSlots);
    }
    DEEP_EP_DEVICE_CALL Pending blocked(u32 entry, u32 n) const {
        const Entry what = at(entry);
        if (what.kind == Entry::kOwn) {
            const Pending slot = local_slot(me.node, what.slot + n * wire::kLocalSlots, what.who);
            return slot.over() ? Pending::none() : slot;
        }
        const u32 source = what.kind == Entry::kForward ? me.origin(what.who) : what.who;
        // A local chunk is sent by the origin's forwarder in this node.
        const u32 sender = what.kind == Entry::kForward ? source : me.near_forwarder(source);
        const u32 kind =
            what.kind == Entry::kForward ? wire::kChunk + what.slot : local_word(wire::kStreamChunk, 0, what.slot);
        const Pending chunk = Pending::of(op, Phase::kChunk, sender, kind, source, n + 1);
        if (!chunk.over()) return chunk;
        for (u32 d = 0; what.kind == Entry::kForward && d < me.per_node; ++d) {
            if (!gets_chunks(d)) continue;
            const Pending slot = local_slot(what.who, what.slot + n * wire::kSlots, d);
            if (!slot.over()) return slot;
        }
        return Pending::none();
    }
    DEEP_EP_DEVICE void step(u32 entry, u32 n) {
        const Entry what = at(entry);
        if (what.kind == Entry::kForward) {
            pass_on(what.who, what.slot + n * wire::kSlots);
        } else if (what.kind == Entry::kPlace) {
            place(what.who, what.slot + n * wire::kLocalSlots);
        } else {
            const u32 chunk = what.slot + n * wire::kLocalSlots;
            const OwnRows rows_of = own_rows(chunk * args.layout.chunk_rows);
            const u32 rows = args.layout.rows_of_chunk(chunk, tables.streams[me.node].sent);
            to.send_local_chunk(rows_of, args.from, op.rank(), me.node, chunk, rows, what.who);
        }
    }
    DEEP_EP_DEVICE_CALL bool fill_in() {
        const u32 first = own * kOwnRows, sent = tables.streams[me.node].sent;
        if (first >= sent) return false;
        to.store_rows(copies, own_rows(first), args.from, me.node, first, min(kOwnRows, sent - first));
        own += own_step;
        return true;
    }

  private:
    DEEP_EP_DEVICE OwnRows own_rows(u32 first) const {
        return {op, {args.plan, me.node, args.tokens, me.per_node}, first};
    }
    // One thread: returns whether a chunk belongs to this operation and holds the expected rows.
    DEEP_EP_DEVICE bool check_chunk(const u8* message, u32 from, u32 first, u32 rows) {
        const auto header = copy_once<wire::ChunkHeader>(message);
        if (!op.check_message(Phase::kChunk, from, header.operation, header.arguments)) return false;
        if (header.first == first && header.rows == rows) return true;
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from), u64{first} << 32 | rows,
                u64{header.first} << 32 | header.rows);
        return false;
    }
    // A warp: passes on chunk `chunk` of a line.
    DEEP_EP_DEVICE_CALL void pass_on(u32 line, u32 chunk) {
        const wire::TwoHopLayout& layout = args.layout;
        const u32 slot = chunk % wire::kSlots, origin = me.origin(line), node_rows = tables.streams[line].forwarded;
        const u32 first = chunk * layout.chunk_rows, rows = layout.rows_of_chunk(chunk, node_rows);
        const u32 place = layout.place(layout.role_of(line), layout.node_of(line), me.node);
        const u8* const message = op.local_region() + layout.rail_chunk(place, slot);
        if (!broadcast(device::lane() == 0 && check_chunk(message, origin, first, rows))) return;
        const ArrivedRows rows_of{message, layout, rows};
        const Rows from = rows_in(message, layout.rail, rows, args.from.topk_idx.id_bytes);
        copies.read_what_came();
        to.store_rows(copies, rows_of, from, line, first, rows);
        for (u32 d = 0; d < me.per_node; ++d) {
            if (gets_chunks(d)) to.send_local_chunk(rows_of, from, origin, line, chunk, rows, d);
        }
        // All lanes have read the slot, and copies from it are complete, before lane 0 releases it to its writer.
        // Litmus: slot_given_back.
        copies.finish();
        if (chunk + wire::kSlots < tables.streams[line].forwarded_chunks && device::lane() == 0) {
            op.signal(origin, wire::kNext + slot);
        }
    }
    // A warp: places a local chunk in this rank's output.
    DEEP_EP_DEVICE_CALL void place(u32 origin, u32 chunk) {
        const wire::TwoHopLayout& layout = args.layout;
        const wire::ChunkFormat& format = layout.local;
        const u32 slot = chunk % wire::kLocalSlots, forwarder = me.near_forwarder(origin);
        const u8* const message = op.local_region() + layout.local_chunk(origin, slot);
        u32 first = 0, rows = 0;
        int fits = 1;
        if (device::lane() == 0) {
            const auto header = copy_once<wire::ChunkHeader>(message);
            first = header.first;
            rows = header.rows;
            fits = op.check_message(Phase::kChunk, forwarder, header.operation, header.arguments);
            if (fits && (rows > layout.chunk_rows || u64{first} + rows > tables.received[origin].rows)) {
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(forwarder), tables.received[origin].rows,
                        u64{first} + rows);
                fits = 0;
            }
        }
        if (!broadcast(fits)) return;
        first = __shfl_sync(device::kFullMask, first, 0);
        rows = __shfl_sync(device::kFullMask, rows, 0);
        const Rows from = rows_in(message, format, rows, args.from.topk_idx.id_bytes);
        const RowTargets& out = args.output;
        const u64 start = u64{tables.received[origin].first} + first;
        const u32 topk = to.shape.topk(), scales = scales_per_row(format);
        device::warp_copy(out.x + start * format.x_bytes, from.x, u64{rows} * format.x_bytes);
        for (u32 i = device::lane(); i < rows * scales; i += device::kWarpSize) {
            out.scales[start * scales + i] = from.scales[i];
        }
        for (u32 i = device::lane(); carries_topk(args) && i < rows * topk; i += device::kWarpSize) {
            out.topk_idx.set(start * topk + i, from.topk_idx.get(i));
            if (format.has_weights()) out.topk_weights[start * topk + i] = from.topk_weights[i];
        }
        const auto* const sources = reinterpret_cast<const RowSource*>(message + format.src_idx_offset(rows));
        for (u32 i = device::lane(); carries_source(args) && i < rows; i += device::kWarpSize) {
            out.source[start + i] = sources[i];
        }
        __syncwarp();  // all lanes have read the slot before lane 0 releases it. Litmus: slot_given_back
        if (chunk + wire::kLocalSlots < layout.chunks(tables.received[origin].node_rows) && device::lane() == 0) {
            op.signal_for(forwarder, local_word(wire::kStreamNext, me.role(forwarder, origin), chunk),
                          Place::stream(origin / me.per_node, me.local, me.per_node));
        }
    }
};

// The forwarding warps of a block, `threads` threads in total: find where the outputs of the node's ranks are.
DEEP_EP_DEVICE bool find_targets(const DispatchArgs& args, Operation& op, const Place& me, u32 threads,
                                 const DispatchTables& tables) {
    for (u32 d = threadIdx.x; d < me.per_node; d += threads) {
        RowTargets target{};
        wire::Offer offer;
        const bool visible = await_offer(args.layout, args.layout.local, op, me, d, args.rows, offer,
                                         tables.ranges + d * args.layout.lines());
        if (d == me.local) {
            target = args.output;
            // If the output has no rows, nothing is stored at this address.
            if (target.x == nullptr) target.x = op.peers().local;
        } else if (visible) {
            u8* const heap = fabric::address(op.peers(), me.near(d), 0);
            target = {heap + offer.x, reinterpret_cast<u32*>(heap + offer.scales),
                      ExpertIds::at(heap + offer.topk_idx, args.from.topk_idx.id_bytes),
                      reinterpret_cast<float*>(heap + offer.topk_weights),
                      reinterpret_cast<RowSource*>(heap + offer.src_idx)};
        }
        tables.targets[d] = target;
    }
    return op.sync_group(threads);
}

// The same warps, the first `forwarders` of each block.
template <class Shape>
DEEP_EP_DEVICE_CALL void forward_all(const DispatchArgs& args, Operation& op, const Shape& shape, const Place& me,
                                     const DispatchTables& tables, const DispatchShared& at, u8* shared,
                                     u32 forwarders) {
    if (!find_targets(args, op, me, forwarders * device::kWarpSize, tables)) return;
    const u32 own = device::warp() * me.per_node;
    const u32 worker = blockIdx.x * forwarders + device::warp(), workers = gridDim.x * forwarders;
    device::RowCopies copies(at.copies.in(shared) + device::warp() * device::RowCopies::kSharedBytes);
    const Forwarder<Shape> to{args,
                              op,
                              shape,
                              me,
                              tables,
                              at.row_addresses.in(shared) + own,
                              at.row_ranks.in(shared) + own,
                              at.row_numbers.in(shared) + own,
                              at.next_rows.in(shared) + own};
    ForwardWork<Shape> work{args, op, to, me, tables, copies, worker, workers};
    serve(op, work, Share{at.done.in(shared) + DispatchShared::sending(op.ranks(), me.per_node), worker, workers});
    copies.finish();
}

// The other warps.
template <class Shape>
DEEP_EP_DEVICE_CALL void send_all(const DispatchArgs& args, Operation& op, const Shape& shape, const Place& me,
                                  const DispatchTables& tables, u32* done, u32 forwarders) {
    const u32 senders = device::warps() - forwarders;
    const SendWork<Shape> work{args, op, shape, me, tables};
    serve(op, work, Share{done, blockIdx.x * senders + device::warp() - forwarders, gridDim.x * senders});
}

// One block, once all have done their parts: ends this operation's use of its words.
DEEP_EP_DEVICE void consume_dispatch(const DispatchArgs& args, Operation& op, const Place& me,
                                     const DispatchTables& tables) {
    const wire::TwoHopLayout& layout = args.layout;
    for (u32 line = threadIdx.x; line < layout.lines(); line += blockDim.x) {
        const u32 sent = tables.streams[line].sent_chunks, forwarded = tables.streams[line].forwarded_chunks;
        const u32 node = layout.node_of(line), role = layout.role_of(line);
        for (u32 slot = 0; line != me.node && slot < wire::kSlots; ++slot) {
            if (forwarded != 0) op.consume(wire::kChunk + slot, me.origin(line), chunks_in_slot(forwarded, slot));
            if (sent != 0) {
                op.consume(wire::kNext + slot, me.forwarder(node), slots_given_back(sent, slot, wire::kSlots));
            }
        }
        for (u32 d = 0; forwarded != 0 && d < me.per_node; ++d) {
            for (u32 slot = 0; gets_local_chunks(tables, me, d) && slot < wire::kLocalSlots; ++slot) {
                op.consume(local_word(wire::kStreamNext, role, slot), Place::stream(node, d, me.per_node),
                           slots_given_back(forwarded, slot, wire::kLocalSlots));
            }
        }
    }
    for (u32 s = threadIdx.x; s < op.ranks(); s += blockDim.x) {
        const u32 chunks = layout.chunks(tables.received[s].node_rows);
        for (u32 slot = 0; places_local_chunks(args, me, s) && slot < wire::kLocalSlots; ++slot) {
            op.consume(local_word(wire::kStreamChunk, 0, slot), s, chunks_in_slot(chunks, slot, wire::kLocalSlots));
        }
    }
}

// The same block: signals what has been stored directly into outputs, and waits for the same from the other ranks.
DEEP_EP_DEVICE_CALL void end_dispatch(const DispatchArgs& args, Operation& op, const Place& me,
                                      const DispatchTables& tables) {
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
        if (me.has(d) && !gets_local_chunks(tables, me, d)) op.signal(me.near(d), wire::kData);
    }
    const auto stores = [&](u32 local) { return me.has(local) && (args.offer.visible != 0 || local == me.local); };
    for (u32 f = threadIdx.x; f < me.per_node; f += blockDim.x) {
        if (stores(f)) op.wait_signal(Phase::kData, wire::kData, me.near(f), 1);
    }
    if (!op.sync_block()) return;
    for (u32 f = threadIdx.x; f < me.per_node; f += blockDim.x) {
        if (me.has(f)) op.consume(wire::kOffer, me.near(f), 1);
        if (stores(f)) op.consume(wire::kData, me.near(f), 1);
    }
    consume_dispatch(args, op, me, tables);
    op.finish(false);
}

// Works with any grid size. Blocks need at least two warps: some send to other nodes, which waits for no offer, and the
// others forward.
template <class Shape>
DEEP_EP_KERNEL void dispatch(DEEP_EP_ARGUMENT const DispatchArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    const auto shape = Shape::of(args.shape);
    // The first kernel of its operation, if the counts were known before; otherwise notify is.
    const bool enters = args.first != 0 ? op.enter_and_begin(wire::Kind::kCachedDispatch, args.arguments, shape.ranks())
                                        : op.enter() && op.await_free();
    if (!enters) return;
    if (threadIdx.x == 0) check_roles(op, args.layout);
    const u32 ranks = shape.ranks(), per_node = args.layout.per_node, warps = device::warps();
    const Place me = Place::of(op.rank(), args.layout, op.environment().mask);
    const DispatchShared at({ranks, 0, shape.topk(), warps, device::RowCopies::kSharedBytes, per_node});
    const DispatchTables tables{at.targets.in(shared), at.ranges.in(shared), at.received.in(shared),
                                at.streams.in(shared)};

    find_received(op, args.plan, args.rows, tables.received);
    find_streams(op, args.plan, args.layout, me, args.tokens, tables.streams);
    if (!op.sync_block()) return;
    if (blockIdx.x == 0) send_offers(args.layout, args.offer, tables.received, op, me);
    const Received last = tables.received[ranks - 1];
    blank_unused_rows(args.output.topk_idx, args.output.topk_weights, u64{last.first} + last.rows, args.rows,
                      shape.topk());

    const u32 forwarders = warps - max(1u, warps / 4);
    if (device::warp() < forwarders) {
        forward_all(args, op, shape, me, tables, at, shared, forwarders);
    } else {
        send_all(args, op, shape, me, tables, at.done.in(shared), forwarders);
    }
    if (op.last_to_finish()) end_dispatch(args, op, me, tables);
}

struct DispatchKernel {
    static constexpr const char* kName = "two_hops_dispatch";
    using Args = DispatchArgs;
    template <class Shape>
    static constexpr auto kEntry = dispatch<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return DispatchShared(block).bytes; }
};

}  // namespace deep_ep::two_hops
