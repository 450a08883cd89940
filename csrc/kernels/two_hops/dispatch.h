// dispatch: every token's row crosses once to each node that holds one of its experts, and is stored there into the
// outputs of all its destination ranks. docs/two_hops.md has the steps, and which waits depend on which.
#pragma once

#include "kernels/two_hops/forward.h"

namespace deep_ep::two_hops {

// This rank's own output is filled from local chunks by other forwarders.
DEEP_EP_DEVICE bool places_local_chunks(const DispatchArgs& args, const Place& me, u32 origin) {
    return args.offer.visible == 0 && me.has_local_stream(origin);
}

// The work of a block that takes turns. Its entries: a slot of a row stream that this rank sends to another node, or
// forwards in this one; a slot for local chunks from a forwarder; and, for each block, a part of this rank's node rows
// for its own node.
template <class Shape>
class DispatchWork {
  public:
    // `range`: in shared memory.
    DEEP_EP_DEVICE DispatchWork(const DispatchArgs& args, Operation& op, const Shape& shape, const Place& me,
                                const DispatchTables& tables, const Forwarder<Shape>& to, device::RowCopies& copies,
                                RowRange* range)
        : args_(args), op_(op), shape_(shape), me_(me), tables_(tables), to_(to), copies_(copies), range_(*range) {
        for (u32 d = 0; d < me.per_node; ++d) sends_locally_ = sends_locally_ || gets_local_chunks(tables, me, d);
        const u32 own = tables.streams[me.node].sent, share = max(1u, wire::ceil_div(own, gridDim.x));
        // Local chunks follow the row stream's division. Otherwise each block takes one share, but few rows at a time,
        // so that newly arrived ones do not wait long.
        window_ = sends_locally_ ? args.layout.chunk_rows : min(share, args.layout.chunk_rows);
        windows_ = sends_locally_ ? tables.streams[me.node].sent_chunks : wire::ceil_div(own, window_);
    }

    DEEP_EP_DEVICE u32 entries() const {
        return DispatchShared::entries(op_.ranks(), me_.per_node, args_.layout.roles) + gridDim.x;
    }
    DEEP_EP_DEVICE u32 steps(u32 entry) const {
        const Entry what = at(entry);
        switch (what.kind) {
            case Entry::kSend:
                return chunks_in_slot(tables_.streams[what.who].sent_chunks, what.slot);
            case Entry::kForward:
                return chunks_in_slot(tables_.streams[what.who].forwarded_chunks, what.slot);
            case Entry::kPlace:
                return places_local_chunks(args_, me_, what.who)
                           ? chunks_in_slot(placed_chunks(what.who), what.slot, wire::kLocalSlots)
                           : 0;
            case Entry::kOwn:
                break;
        }
        return chunks_in_slot(windows_, what.slot, gridDim.x);
    }
    DEEP_EP_DEVICE Pending blocked(u32 entry, u32 n) const {
        Pending missing = Pending::none();
        each_awaited(at(entry), n, [&](const Pending& pending) {
            if (!pending.looks_over()) missing = pending;
            return missing.word == nullptr;
        });
        return missing;
    }
    DEEP_EP_DEVICE bool open(u32 entry, u32 n) {
        const Entry what = at(entry);
        bool fits = true;
        if (device::lane() == 0) {
            each_awaited(what, n, [](const Pending& pending) {
                pending.acquire();
                return true;
            });
            const u32 chunk = what.chunk(n);
            if (what.kind == Entry::kForward) fits = came_as_due(what.who, chunk);
            if (what.kind == Entry::kPlace) fits = find_rows(what.who, chunk);
        }
        return broadcast(fits) != 0;
    }
    DEEP_EP_DEVICE void step(u32 entry, u32 n) {
        const Entry what = at(entry);
        const u32 chunk = what.chunk(n);
        switch (what.kind) {
            case Entry::kSend:
                return fill(what.who, chunk);
            case Entry::kForward:
                return pass_on(what.who, chunk);
            case Entry::kPlace:
                return place(what.who, chunk);
            case Entry::kOwn:
                break;
        }
        to_.store_rows(copies_, own_rows(chunk), args_.from, op_.rank(), me_.node, chunk, chunk * window_,
                       rows_of_window(chunk));
    }
    // All threads' stores into a chunk come before its release, or before the NIC's reads; and all of them have read a
    // slot before it is released to its writer. Litmus: slot_given_back.
    //
    // The caller's rows are sent only if this rank has not been told of a failure since it has loaded them (P12).
    DEEP_EP_DEVICE void close(u32 entry, u32 n) {
        const Entry what = at(entry);
        const u32 chunk = what.chunk(n);
        switch (what.kind) {
            case Entry::kSend:
                return send(what.who, chunk);
            case Entry::kForward:
                return end_forwarding(what.who, chunk);
            case Entry::kPlace:
                return give_back(what.who, chunk);
            case Entry::kOwn:
                break;
        }
        if (!sends_locally_ || !broadcast(device::lane() != 0 || op_.looks_clear())) return;
        to_.send_local_chunks(own_rows(chunk), op_.rank(), me_.node, chunk, rows_of_window(chunk));
    }

  private:
    struct Entry {
        enum Kind { kSend, kForward, kPlace, kOwn } kind;
        u32 who;   // node, line, or origin
        u32 slot;  // or block

        DEEP_EP_DEVICE u32 slots() const {
            return kind == kOwn ? gridDim.x : kind == kPlace ? wire::kLocalSlots : wire::kSlots;
        }
        DEEP_EP_DEVICE u32 chunk(u32 n) const { return slot + n * slots(); }
    };
    DEEP_EP_DEVICE Entry at(u32 entry) const {
        const wire::TwoHopLayout& layout = args_.layout;
        const u32 sends = DispatchShared::sending(op_.ranks(), me_.per_node);
        if (entry < sends) {
            return {Entry::kSend, layout.node_at(entry / wire::kSlots, me_.node), entry % wire::kSlots};
        }
        entry -= sends;
        const u32 forwards = DispatchShared::forwarding(op_.ranks(), me_.per_node, layout.roles);
        if (entry < forwards) {
            return {Entry::kForward, layout.line_at(entry / wire::kSlots, me_.node), entry % wire::kSlots};
        }
        entry -= forwards;
        const u32 places = DispatchShared::placing(op_.ranks());
        if (entry < places) return {Entry::kPlace, entry / wire::kLocalSlots, entry % wire::kLocalSlots};
        return {Entry::kOwn, 0, entry - places};
    }
    DEEP_EP_DEVICE u32 placed_chunks(u32 origin) const {
        return args_.layout.chunks(tables_.received[origin].node_rows);
    }
    // One thread: calls `use` with each thing that an entry's n-th step waits for, while it returns true.
    template <class Use>
    DEEP_EP_DEVICE void each_awaited(const Entry& what, u32 n, Use use) const {
        const u32 chunk = what.chunk(n), who = what.who;
        if (what.kind == Entry::kSend) {
            const u32 to = me_.forwarder(who);
            use(Pending::of(op_, Phase::kNext, to, wire::kNext + what.slot, to, n));
        } else if (what.kind == Entry::kPlace) {
            // It is sent by the origin's forwarder in this node.
            use(Pending::of(op_, Phase::kChunk, me_.near_forwarder(who), local_word(wire::kStreamChunk, 0, chunk), who,
                            n + 1));
        } else {
            const bool forwards = what.kind == Entry::kForward;
            const u32 origin = forwards ? me_.origin(who) : op_.rank(), line = forwards ? who : me_.node;
            if (forwards && !use(Pending::of(op_, Phase::kChunk, origin, wire::kChunk + what.slot, origin, n + 1))) {
                return;
            }
            for (u32 d = 0; sends_locally_ && d < me_.per_node; ++d) {
                if (gets_local_chunks(tables_, me_, d) && !use(local_slot(line, chunk, d))) return;
            }
        }
    }
    // The slot of a local chunk, at a receiver of a line.
    DEEP_EP_DEVICE Pending local_slot(u32 line, u32 chunk, u32 local) const {
        const u32 role = args_.layout.role_of(line), node = args_.layout.node_of(line);
        return Pending::of(op_, Phase::kNext, me_.near(local), local_word(wire::kStreamNext, role, chunk),
                           Place::stream(node, local, me_.per_node), chunk / wire::kLocalSlots);
    }
    DEEP_EP_DEVICE OwnRows rows_from(u32 first, u32 node) const {
        return {op_, {args_.plan, node, args_.tokens, me_.per_node}, first};
    }
    DEEP_EP_DEVICE OwnRows own_rows(u32 window) const { return rows_from(window * window_, me_.node); }
    DEEP_EP_DEVICE u32 rows_of_window(u32 window) const {
        return min(window_, tables_.streams[me_.node].sent - window * window_);
    }

    // --- to another node
    struct Sent {
        u32 to;
        u64 source, target;
        u8* message;  // where it is built
    };
    DEEP_EP_DEVICE Sent sent(u32 node, u32 chunk) const {
        const wire::TwoHopLayout& layout = args_.layout;
        const u32 slot = chunk % wire::kSlots, to = me_.forwarder(node), role = me_.role(to, op_.rank());
        const u64 source = op_.region_offset() + layout.rail_chunk_send(layout.place(node, me_.node), slot);
        const u64 target = op_.region_offset() + layout.rail_chunk(layout.place(role, me_.node, node), slot);
        return {to, source, target, chunk_to_send(op_, to, source, target)};
    }
    DEEP_EP_DEVICE u32 rows_to_send(u32 node, u32 chunk) const {
        return args_.layout.rows_of_chunk(chunk, tables_.streams[node].sent);
    }
    // Each warp of a block: writes its part of a chunk: unchanged node rows, with the destination ranks of each.
    DEEP_EP_DEVICE void fill(u32 node, u32 chunk) {
        const wire::TwoHopLayout& layout = args_.layout;
        const u32 first = chunk * layout.chunk_rows, rows = rows_to_send(node, chunk), row_bytes = shape_.row_bytes();
        const u32 words = wire::set_words(me_.per_node), topk = shape_.topk();
        u8* const message = sent(node, chunk).message;
        const OwnRows rows_of = rows_from(first, node);
        const RowTargets parts = targets_in(message, layout.rail, rows, args_.from.topk_idx.id_bytes);
        copy_rows(
            copies_, rows, row_bytes, false, [&](u32 i) { return args_.from.x + u64{rows_of.row(i)} * row_bytes; },
            [&](u32 i) { return parts.x + u64{i} * row_bytes; });
        for (u32 i = device::warp(); i < rows; i += device::warps()) {
            const u32 row = rows_of.row(i);
            if (layout.rail.scales_bytes != 0) {
                store_scales(args_.from, layout.rail, row, parts.scales + i * scales_per_row(layout.rail));
            }
            for (u32 k = device::lane(); carries_topk(args_) && k < topk; k += device::kWarpSize) {
                const u64 from = u64{row} * topk + k;
                parts.topk_idx.set(i * topk + k, args_.from.topk_idx.get(from));
                if (layout.rail.has_weights()) parts.topk_weights[i * topk + k] = args_.from.topk_weights[from];
            }
        }
        auto* const tokens = reinterpret_cast<i32*>(parts.source);
        for (u32 i = threadIdx.x; carries_source(args_) && i < rows; i += blockDim.x) tokens[i] = rows_of.token(i);
        auto* const firsts = reinterpret_cast<u32*>(message + layout.firsts_offset(rows));
        auto* const sets = reinterpret_cast<u32*>(message + layout.sets_offset(rows));
        for (u32 d = threadIdx.x; d < me_.per_node; d += blockDim.x) firsts[d] = rows != 0 ? rows_of.first_row(d) : 0;
        for (u32 i = threadIdx.x; i < rows * words; i += blockDim.x) sets[i] = rows_of.sent.set(first)[i];
    }
    DEEP_EP_DEVICE void send(u32 node, u32 chunk) const {
        if (!broadcast(device::lane() != 0 || op_.looks_clear())) return;
        const u32 rows = rows_to_send(node, chunk);
        const Sent way = sent(node, chunk);
        if (device::lane() == 0) store_chunk_header(op_, way.message, chunk * args_.layout.chunk_rows, rows);
        send_chunk(op_, way.to, chunk % wire::kSlots, way.source, way.target, args_.layout.rail_bytes(rows));
    }

    // --- from another node
    DEEP_EP_DEVICE const u8* arrived(u32 line, u32 chunk) const {
        const wire::TwoHopLayout& layout = args_.layout;
        const u32 place = layout.place(layout.role_of(line), layout.node_of(line), me_.node);
        return op_.local_region() + layout.rail_chunk(place, chunk % wire::kSlots);
    }
    DEEP_EP_DEVICE ArrivedRows arrived_rows(u32 line, u32 chunk) const {
        const u32 rows = args_.layout.rows_of_chunk(chunk, tables_.streams[line].forwarded);
        return {arrived(line, chunk), args_.layout, rows};
    }
    // One thread: returns whether a chunk belongs to this operation and holds the expected rows.
    DEEP_EP_DEVICE bool came_as_due(u32 line, u32 chunk) const {
        const u32 from = me_.origin(line), first = chunk * args_.layout.chunk_rows;
        const ArrivedRows due = arrived_rows(line, chunk);
        const auto header = copy_once<wire::ChunkHeader>(due.message);
        if (!op_.check_message(Phase::kChunk, from, header.operation, header.arguments)) return false;
        if (header.first == first && header.rows == due.rows) return true;
        op_.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from), u64{first} << 32 | due.rows,
                 u64{header.first} << 32 | header.rows);
        return false;
    }
    DEEP_EP_DEVICE void pass_on(u32 line, u32 chunk) {
        const ArrivedRows rows_of = arrived_rows(line, chunk);
        const Rows from = rows_in(rows_of.message, args_.layout.rail, rows_of.rows, args_.from.topk_idx.id_bytes);
        to_.store_rows(copies_, rows_of, from, me_.origin(line), line, chunk, chunk * args_.layout.chunk_rows,
                       rows_of.rows);
    }
    DEEP_EP_DEVICE void end_forwarding(u32 line, u32 chunk) const {
        const u32 origin = me_.origin(line);
        const ArrivedRows rows_of = arrived_rows(line, chunk);
        if (sends_locally_) to_.send_local_chunks(rows_of, origin, line, chunk, rows_of.rows);
        __syncwarp();  // the lanes have read the sets
        if (chunk + wire::kSlots < tables_.streams[line].forwarded_chunks && device::lane() == 0) {
            op_.signal(origin, wire::kNext + chunk % wire::kSlots);
        }
    }

    // --- from a forwarder of this node
    DEEP_EP_DEVICE const u8* local_chunk(u32 origin, u32 chunk) const {
        return op_.local_region() + args_.layout.local_chunk(origin, chunk % wire::kLocalSlots);
    }
    // One thread: notes which of the origin's rows a local chunk holds.
    DEEP_EP_DEVICE bool find_rows(u32 origin, u32 chunk) {
        const u32 forwarder = me_.near_forwarder(origin), most = tables_.received[origin].rows;
        const auto header = copy_once<wire::ChunkHeader>(local_chunk(origin, chunk));
        if (!op_.check_message(Phase::kChunk, forwarder, header.operation, header.arguments)) return false;
        range_ = {header.first, header.rows};
        if (header.rows <= args_.layout.chunk_rows && u64{header.first} + header.rows <= most) return true;
        op_.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(forwarder), most, u64{header.first} + header.rows);
        return false;
    }
    // Each warp of a block: places its part of a local chunk in this rank's output.
    DEEP_EP_DEVICE void place(u32 origin, u32 chunk) {
        const wire::ChunkFormat& format = args_.layout.local;
        const u8* const message = local_chunk(origin, chunk);
        const u32 rows = range_.rows, row_bytes = shape_.row_bytes(), topk = shape_.topk();
        const u32 scales = scales_per_row(format);
        const u64 start = u64{tables_.received[origin].first} + range_.first;
        const Rows from = rows_in(message, format, rows, args_.from.topk_idx.id_bytes);
        const RowTargets& out = args_.output;
        copy_rows(
            copies_, rows, row_bytes, args_.streaming != 0, [&](u32 i) { return from.x + u64{i} * row_bytes; },
            [&](u32 i) { return out.x + (start + i) * row_bytes; });
        for (u32 i = threadIdx.x; i < rows * scales; i += blockDim.x) out.scales[start * scales + i] = from.scales[i];
        for (u32 i = threadIdx.x; carries_topk(args_) && i < rows * topk; i += blockDim.x) {
            out.topk_idx.set(start * topk + i, from.topk_idx.get(i));
            if (format.has_weights()) out.topk_weights[start * topk + i] = from.topk_weights[i];
        }
        const auto* const sources = reinterpret_cast<const RowSource*>(message + format.src_idx_offset(rows));
        for (u32 i = threadIdx.x; carries_source(args_) && i < rows; i += blockDim.x)
            out.source[start + i] = sources[i];
    }
    DEEP_EP_DEVICE void give_back(u32 origin, u32 chunk) const {
        if (chunk + wire::kLocalSlots >= placed_chunks(origin) || device::lane() != 0) return;
        const u32 forwarder = me_.near_forwarder(origin);
        op_.signal_for(forwarder, local_word(wire::kStreamNext, me_.role(forwarder, origin), chunk),
                       Place::stream(origin / me_.per_node, me_.local, me_.per_node));
    }

    const DispatchArgs& args_;
    Operation& op_;
    const Shape shape_;
    const Place& me_;
    const DispatchTables& tables_;
    const Forwarder<Shape>& to_;
    device::RowCopies& copies_;
    RowRange& range_;             // the rows of the local chunk whose turn it is
    bool sends_locally_ = false;  // some rank of the node gets local chunks
    u32 window_;                  // this rank's node rows for its own node that are stored at a time
    u32 windows_;
};

// The block: finds where the outputs of the node's ranks are.
DEEP_EP_DEVICE bool find_targets(const DispatchArgs& args, Operation& op, const Place& me,
                                 const DispatchTables& tables) {
    for (u32 d = threadIdx.x; d < me.per_node; d += blockDim.x) {
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
    return op.sync_block();
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
    // The caller's rows have been stored too: see DispatchWork::close().
    if (threadIdx.x == 0) op.looks_clear();
    if (!op.sync_block()) return;
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

// Works with any grid size. Blocks consist of whole warps.
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

    if (!find_targets(args, op, me, tables)) return;
    op.ended(Stage::kOffers);

    const u32 own = device::warp() * per_node;
    const Forwarder<Shape> to{args,
                              op,
                              shape,
                              me,
                              tables,
                              at.row_addresses.in(shared) + own,
                              at.row_ranks.in(shared) + own,
                              at.row_numbers.in(shared) + own,
                              at.next_rows.in(shared) + own,
                              at.first_rows.in(shared) + own,
                              at.chunk_rows.in(shared) + own};
    device::RowCopies copies(at.copies.in(shared) + device::warp() * device::RowCopies::kSharedBytes);
    DispatchWork<Shape> work(args, op, shape, me, tables, to, copies, at.range.in(shared));
    take_turns(op, work, Turns::in(at.turns.in(shared)));
    op.ended(Stage::kServe);
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
