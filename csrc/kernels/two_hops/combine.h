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

// The work of a block that takes turns. Its entries: for each block, the windows of this rank's tokens that it sums; a
// slot of a row stream that this rank forwards; and a slot for the local chunks that it sends.
template <class Shape>
class CombineWork {
  public:
    // `range`: in shared memory.
    DEEP_EP_DEVICE CombineWork(const CombineArgs& args, Operation& op, const Shape& shape, const Place& me,
                               const CombineTables& tables, const Gatherer& rows, const OwnerSums<Shape>& own,
                               device::RowCopies& copies, device::RowSums& sums, RowRange* range)
        : args_(args),
          op_(op),
          shape_(shape),
          me_(me),
          tables_(tables),
          rows_(rows),
          own_(own),
          copies_(copies),
          sums_(sums),
          range_(*range) {
        if (device::warp() == 0 && blockIdx.x < own.windows()) own.find_needed(blockIdx.x);
    }

    DEEP_EP_DEVICE u32 entries() const { return forwards() + locals() + gridDim.x; }
    DEEP_EP_DEVICE u32 steps(u32 entry) const {
        const Entry what = at(entry);
        switch (what.kind) {
            case Entry::kForward:
                return chunks_in_slot(tables_.streams[what.who].forwarded_chunks, what.slot);
            case Entry::kLocal:
                return sends_local_chunks(args_, me_, what.who)
                           ? chunks_in_slot(args_.layout.chunks(tables_.received[what.who].node_rows), what.slot,
                                            wire::kLocalSlots)
                           : 0;
            case Entry::kOwn:
                break;
        }
        return chunks_in_slot(own_.windows(), what.slot, gridDim.x);
    }
    DEEP_EP_DEVICE Pending blocked(u32 entry, u32 n) const {
        const Entry what = at(entry);
        if (what.kind == Entry::kOwn) return own_.blocked();
        Pending missing = Pending::none();
        each_awaited(what, n, [&](const Pending& pending) {
            if (!pending.looks_over()) missing = pending;
            return missing.word == nullptr;
        });
        return missing;
    }
    DEEP_EP_DEVICE bool open(u32 entry, u32 n) {
        const Entry what = at(entry);
        if (what.kind == Entry::kOwn) return broadcast(device::lane() != 0 || own_.open()) != 0;
        if (device::lane() == 0) {
            each_awaited(what, n, [](const Pending& pending) {
                pending.acquire();
                return true;
            });
        }
        return what.kind == Entry::kForward || find_rows(what.who, what.chunk(n));
    }
    DEEP_EP_DEVICE void step(u32 entry, u32 n) {
        const Entry what = at(entry);
        const u32 chunk = what.chunk(n);
        if (what.kind == Entry::kForward) {
            sum_chunk(what.who, chunk);
        } else if (what.kind == Entry::kLocal) {
            fill(what.who, chunk);
        } else {
            own_.sum(chunk);
        }
    }
    // All threads' stores into a chunk come before its release, or before the NIC's reads.
    DEEP_EP_DEVICE void close(u32 entry, u32 n) {
        const Entry what = at(entry);
        const u32 chunk = what.chunk(n);
        if (what.kind == Entry::kOwn) {
            if (chunk + gridDim.x < own_.windows()) own_.find_needed(chunk + gridDim.x);
            return;
        }
        // The receiver is told late of a failure in another node, or by a host. Therefore rows, or sums of published
        // rows, are sent only if this rank has not been told of one: after a failure, kernels of the failed rank, or
        // the caller of this one, may already overwrite them (P12).
        if (!broadcast(device::lane() != 0 || op_.looks_clear())) return;
        if (what.kind == Entry::kForward) {
            return_chunk(what.who, chunk);
        } else {
            send_local_chunk(what.who, chunk);
        }
    }

  private:
    struct Entry {
        enum Kind { kForward, kLocal, kOwn } kind;
        u32 who;   // line, or owner
        u32 slot;  // or block

        DEEP_EP_DEVICE u32 slots() const {
            return kind == kOwn ? gridDim.x : kind == kLocal ? wire::kLocalSlots : wire::kSlots;
        }
        DEEP_EP_DEVICE u32 chunk(u32 n) const { return slot + n * slots(); }  // or window
    };
    DEEP_EP_DEVICE u32 forwards() const {
        return CombineShared::forwarding(op_.ranks(), me_.per_node, args_.layout.roles);
    }
    DEEP_EP_DEVICE u32 locals() const { return CombineShared::sending(op_.ranks()); }
    DEEP_EP_DEVICE Entry at(u32 entry) const {
        // The first entry of each block, so that it has the block's number.
        if (entry < gridDim.x) return {Entry::kOwn, 0, entry};
        entry -= gridDim.x;
        if (entry >= forwards()) {
            entry -= forwards();
            return {Entry::kLocal, entry / wire::kLocalSlots, entry % wire::kLocalSlots};
        }
        return {Entry::kForward, args_.layout.line_at(entry / wire::kSlots, me_.node), entry % wire::kSlots};
    }
    // One thread: calls `use` with each thing that an entry's n-th step waits for, while it returns true.
    template <class Use>
    DEEP_EP_DEVICE void each_awaited(const Entry& what, u32 n, Use use) const {
        const u32 chunk = what.chunk(n);
        if (what.kind == Entry::kLocal) {
            use(Pending::of(op_, Phase::kNext, me_.near_forwarder(what.who), local_word(wire::kStreamNext, 0, chunk),
                            what.who, n));
            return;
        }
        const u32 owner = me_.origin(what.who);
        if (!use(Pending::of(op_, Phase::kNext, owner, wire::kNext + what.slot, owner, n))) return;
        for (u32 d = 0; d < me_.per_node; ++d) {
            if (rows_.sends(d) && !use(rows_.local_chunk(what.who, chunk, d))) return;
        }
    }

    // --- sums for an owner in another node
    struct Return {
        u32 owner;
        u64 source, target;
        u8* message;  // where the chunk is built
        u32 rows;
    };
    DEEP_EP_DEVICE Return way_back(u32 line, u32 chunk) const {
        const wire::TwoHopLayout& layout = args_.layout;
        const u32 slot = chunk % wire::kSlots, to = layout.node_of(line), owner = me_.origin(line);
        const u32 place = layout.place(layout.role_of(line), to, me_.node);
        const u64 source = op_.region_offset() + layout.rail_chunk_send(place, slot);
        const u64 target = op_.region_offset() + layout.rail_chunk(layout.place(me_.node, to), slot);
        return {owner, source, target, chunk_to_send(op_, owner, source, target),
                layout.rows_of_chunk(chunk, tables_.streams[line].forwarded)};
    }
    // Each warp of a block: sums its part of a chunk's rows.
    DEEP_EP_DEVICE_CALL void sum_chunk(u32 line, u32 chunk) {
        const wire::TwoHopLayout& layout = args_.layout;
        const Return way = way_back(line, chunk);
        if (!rows_.find(line, chunk)) return;
        for (u32 i = device::warp(); i < way.rows; i += device::warps()) {
            const u32 row = tables_.streams[line].begin + chunk * layout.chunk_rows + i;
            const u32 summands = rows_.list(row, 0);
            __syncwarp();  // the list is complete
            sum_rows(sums_, way.message + layout.rail.x_offset() + u64{i} * shape_.row_bytes(), rows_.into, summands,
                     nullptr, nullptr, shape_.row_bytes());
            if (carries_weights(args_)) {
                auto* const weights = reinterpret_cast<float*>(way.message + layout.rail.topk_weights_offset(way.rows));
                rows_.sum_weights(row, 0, summands, summands, weights + i * shape_.topk());
            }
            __syncwarp();  // the list has been read
        }
    }
    DEEP_EP_DEVICE void return_chunk(u32 line, u32 chunk) const {
        const wire::TwoHopLayout& layout = args_.layout;
        const Return way = way_back(line, chunk);
        if (device::lane() == 0) {
            rows_.give_back(chunk, layout.chunks(tables_.streams[line].forwarded), way.owner);
            store_chunk_header(op_, way.message, chunk * layout.chunk_rows, way.rows);
        }
        send_chunk(op_, way.owner, chunk % wire::kSlots, way.source, way.target, layout.rail_bytes(way.rows));
    }

    // --- this rank's rows, to a forwarder of the node
    // A warp: stores which of the owner's rows belong to a chunk: those whose node rows do.
    DEEP_EP_DEVICE bool find_rows(u32 owner, u32 chunk) {
        const Received here = tables_.received[owner];
        const RowSource* const sources = args_.source + here.first;
        const auto first_of = [&](u32 node_row) {
            return first_not_below(0, here.rows,
                                   [&](u32 row) { return static_cast<u32>(sources[row].node_row) < node_row; });
        };
        const u32 most = args_.layout.chunk_rows, first = first_of(chunk * most);
        const u32 rows = first_of((chunk + 1) * most) - first;
        if (device::lane() == 0) range_ = {first, rows};
        if (rows <= most) return true;
        op_.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(owner), most, rows);
        return false;
    }
    struct Local {
        u32 forwarder, role, stream;
        u8* message;
    };
    DEEP_EP_DEVICE Local local_chunk(u32 owner, u32 chunk) const {
        const u32 forwarder = me_.near_forwarder(owner), role = me_.role(forwarder, owner);
        const u32 stream = Place::stream(owner / me_.per_node, me_.local, me_.per_node);
        const u64 offset = args_.layout.local_chunk(stream, chunk % wire::kLocalSlots, role);
        return {forwarder, role, stream, fabric::address(op_.peers(), forwarder, op_.region_offset() + offset)};
    }
    // Each warp of a block: writes its part of the rows.
    DEEP_EP_DEVICE void fill(u32 owner, u32 chunk) {
        const wire::ChunkFormat& format = args_.layout.local;
        u8* const message = local_chunk(owner, chunk).message;
        const u32 rows = range_.rows, row_bytes = shape_.row_bytes(), topk = shape_.topk();
        const u64 row = u64{tables_.received[owner].first} + range_.first;
        copy_rows(
            copies_, rows, row_bytes, false, [&](u32 i) { return args_.x + (row + i) * row_bytes; },
            [&](u32 i) { return message + format.x_offset() + u64{i} * row_bytes; });
        auto* const weights = reinterpret_cast<float*>(message + format.topk_weights_offset(rows));
        for (u32 i = threadIdx.x; carries_weights(args_) && i < rows * topk; i += blockDim.x) {
            weights[i] = args_.topk_weights[row * topk + i];
        }
    }
    DEEP_EP_DEVICE void send_local_chunk(u32 owner, u32 chunk) const {
        if (device::lane() != 0) return;
        const Local to = local_chunk(owner, chunk);
        store_chunk_header(op_, to.message, range_.first, range_.rows);
        op_.signal_for(to.forwarder, local_word(wire::kStreamChunk, to.role, chunk), to.stream);
    }

    const CombineArgs& args_;
    Operation& op_;
    const Shape shape_;
    const Place& me_;
    const CombineTables& tables_;
    const Gatherer& rows_;
    const OwnerSums<Shape>& own_;
    device::RowCopies& copies_;
    device::RowSums& sums_;
    RowRange& range_;  // the rows of the local chunk whose turn it is
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

// Works with any grid size. Blocks consist of whole warps.
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
    const CombineShared at({ranks, 0, shape.topk(), warps, device::RowCopies::kSharedBytes, per_node});
    const CombineTables tables{at.published.in(shared), at.ranges.in(shared), at.received.in(shared),
                               at.streams.in(shared)};

    find_received(op, args.plan, args.rows, tables.received);
    find_streams(op, args.plan, args.layout, me, args.tokens, tables.streams);
    if (!op.sync_block()) return;
    if (blockIdx.x == 0) send_offers(args.layout, args.offer, tables.received, op, me);
    if (!find_published(args, op, me, tables)) return;
    op.ended(Stage::kOffers);

    u8* const stage =
        at.stages.in(shared) + device::warp() * device::copies_and_sums_bytes(device::RowCopies::kSharedBytes);
    device::RowCopies copies(stage);
    device::RowSums sums(stage);
    const u32 summands = device::warp() * CombineShared::summands(ranks, per_node);
    const Gatherer rows{args,
                        op,
                        me,
                        shape.row_bytes(),
                        shape.topk(),
                        tables,
                        at.near.in(shared) + device::warp() * per_node,
                        {at.row_x.in(shared) + summands, at.row_weights.in(shared) + summands}};
    bool staged = false;
    for (u32 d = 0; d < per_node; ++d) staged = staged || rows.sends(d);
    const OwnerSums<Shape> own{args, op, shape, me, tables, rows, sums, staged, at.needed.in(shared)};
    CombineWork<Shape> work(args, op, shape, me, tables, rows, own, copies, sums, at.range.in(shared));
    take_turns(op, work, Turns::in(at.turns.in(shared)));
    op.ended(Stage::kSum);
    if (op.last_to_finish()) end_combine(args, op, me, tables);
}

struct CombineKernel {
    static constexpr const char* kName = "two_hops_combine";
    static constexpr bool kFewerWarps = true;
    using Args = CombineArgs;
    template <class Shape>
    static constexpr auto kEntry = combine<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return CombineShared(block).bytes; }
};

}  // namespace deep_ep::two_hops
