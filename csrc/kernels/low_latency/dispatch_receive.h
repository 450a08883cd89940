// The receiving half of a low-latency dispatch: places rows by expert, in the order of sources and tokens.
//
// Where a source's rows begin depends only on the routings of all sources before it. Therefore its rows can be placed
// once these routings and its own rows have arrived, while rows of later sources may still be in transit.
#pragma once

#include "kernels/common/zero_row.h"
#include "kernels/low_latency/dispatch_args.h"

namespace deep_ep::low_latency {

DEEP_EP_DEVICE const u8* routing_of(const DispatchArgs& args, const Operation& op, u32 source) {
    return op.local_region() + args.layout.routing(source);
}
DEEP_EP_DEVICE Routed routed_of(const DispatchArgs& args, const Operation& op, u32 source, u32 topk) {
    return {{reinterpret_cast<const wire::RoutedId*>(routing_of(args, op, source) + args.layout.ids_offset())}, topk};
}

// One thread: takes the routing of a source that has arrived or is masked.
DEEP_EP_DEVICE Source take_routing(const DispatchArgs& args, Operation& op, u32 source) {
    if (!op.takes_part(source)) return {};
    const auto header = copy_once<wire::RoutingHeader>(routing_of(args, op, source));
    if (!op.check_message(Phase::kNotify, source, header.operation, header.arguments)) return {};
    if (header.tokens > args.layout.max_tokens || header.first_result > args.layout.max_results()) {
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(source), args.layout.max_tokens, header.tokens);
        return {};
    }
    return {header.tokens, header.first_result, 1};
}

// One thread: adds the time since `begin` to what the caller learns about a source.
DEEP_EP_DEVICE void add_wait(const DispatchArgs& args, u32 source, u64 begin) {
    // One block adds the wait for the routing, another may add that for the rows. Only the caller reads the sum, after
    // the kernel.
    device::add_relaxed<Scope::kDevice>(reinterpret_cast<u64*>(args.waited_ns) + source, device::now_ns() - begin);
}

// One thread: waits for the routing of a source.
DEEP_EP_DEVICE void await_routing(const DispatchArgs& args, Operation& op, u32 source) {
    const bool timed = args.waited_ns != nullptr && blockIdx.x == 0;
    const u64 begin = timed ? device::now_ns() : 0;
    op.wait_signal(Phase::kNotify, wire::kNotify, source, 1);
    if (timed) add_wait(args, source, begin);
}

// The first warp: takes the routings of source `known` and of all after it that have arrived without a gap; waits for
// the first one only if it is not there. Returns the first source whose routing is not known.
DEEP_EP_DEVICE u32 take_routings(const DispatchArgs& args, Operation& op, Source* sources, u32 ranks, u32 known) {
    for (u32 base = known; base < ranks; base += device::kWarpSize) {
        const u32 source = base + device::lane();
        const auto is_here = [&] {
            return source < ranks &&
                   (!op.present(source) || op.has_arrived(wire::kNotify, source, 1) || op.masked(source));
        };
        bool here = is_here();
        if (base == known && !broadcast(here)) {
            if (device::lane() == 0) await_routing(args, op, source);
            __syncwarp();
            here = here || is_here();
        }
        if (here) sources[source] = op.present(source) ? take_routing(args, op, source) : Source{};
        const u32 mask = __ballot_sync(device::kFullMask, here);
        if (mask != device::kFullMask) return base + static_cast<u32>(__ffs(static_cast<int>(~mask))) - 1;
    }
    return ranks;
}

// Returns whether this rank sums its node's results for a source, and therefore keeps the routing.
DEEP_EP_DEVICE bool keeps_routing(const DispatchArgs& args, const Operation& op, u32 source) {
    return args.layout.weighted != 0 && !op.maps(source) && args.layout.same_local_index(op.rank(), source);
}

// The first warp, which has acquired their routings: finds where the rows of sources [from, to) begin, expert by
// expert. The first block stores the result for the caller.
DEEP_EP_DEVICE void find_starts(const DispatchArgs& args, Operation& op, const DispatchScratch& scratch, u32 ranks,
                                u32 from, u32 to) {
    constexpr u32 kBatch = 8;  // counts that are loaded before the first one is used
    const u32 experts = args.layout.experts_per_rank;
    const u8* const announced = routing_of(args, op, 0) + sizeof(wire::RoutingHeader);
    const u64 stride = args.layout.routing(1);
    for (u32 e = device::lane(); e < experts; e += device::kWarpSize) {
        u32 end = from == 0 ? 0 : scratch.ends[e];
        for (u32 first = from; first < to; first += kBatch) {
            u32 counts[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                const bool takes_part = first + i < to && scratch.sources[first + i].takes_part != 0;
                const u8* const place = announced + (first + i) * stride + e * sizeof(u32);
                counts[i] = takes_part ? *reinterpret_cast<const volatile u32*>(place) : 0;
            }
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                const u32 source = first + i;
                if (source >= to) break;
                if (counts[i] > scratch.sources[source].tokens) {
                    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(source), scratch.sources[source].tokens,
                            counts[i]);
                    counts[i] = 0;
                }
                scratch.starts[source * experts + e] = end;
                if (blockIdx.x == 0) args.origins.ranges[e * ranks + source] = static_cast<i64>(end) << 32 | counts[i];
                end += counts[i];
            }
        }
        scratch.ends[e] = end;
        if (blockIdx.x == 0 && to == ranks) args.recv_count[e] = static_cast<i32>(end);
    }
    for (u32 source = from + device::lane(); blockIdx.x == 0 && source < to; source += device::kWarpSize) {
        args.origins.first_result[source] = scratch.sources[source].first_result;
        if (keeps_routing(args, op, source)) {
            args.origins.forwarded_tokens[args.layout.node_of(source)] = scratch.sources[source].tokens;
        }
    }
}

// The tokens of a source whose rows a block places.
struct TokenShare {
    u32 first, end;

    DEEP_EP_DEVICE bool has(u32 token) const { return token - first < end - first; }
};

// A block's part of all sources' tokens, which are divided equally among the blocks. The division must not depend on
// what has arrived, since other blocks may have seen more of it.
class BlockShare {
  public:
    DEEP_EP_DEVICE BlockShare(const DispatchArgs& args, u32 ranks) : most_(args.layout.max_tokens) {
        const u32 each = ranks * most_ / gridDim.x, rest = ranks * most_ - each * gridDim.x;
        begin_ = blockIdx.x * each + min(blockIdx.x, rest);
        end_ = begin_ + each + (blockIdx.x < rest ? 1 : 0);
    }
    DEEP_EP_DEVICE TokenShare of(u32 source) const {
        const u32 before = source * most_;
        const auto within = [&](u32 at) { return at <= before ? 0 : min(at - before, most_); };
        return {within(begin_), within(end_)};
    }

  private:
    const u32 most_;
    u32 begin_, end_;
};

// Bits below `bit` of an array of words.
DEEP_EP_DEVICE u32 count_below(const u32* words, u32 bit) {
    u32 count = 0;
#pragma unroll
    for (u32 word = 0; word < kWindowUnits; ++word) {
        const u32 begin = word * wire::kUnitTokens;
        if (begin >= bit) break;
        count += static_cast<u32>(
            __popc(bit - begin < wire::kUnitTokens ? words[word] & bits_below(bit - begin) : words[word]));
    }
    return count;
}

// A warp: notes what the tokens of a unit choose. The marks are clear before.
template <class Shape>
DEEP_EP_DEVICE void mark_unit(const DispatchArgs& args, const Operation& op, const Shape& shape, const Routed& routed,
                              const Window& window, u32 unit, const TokenShare& share, u32 tokens) {
    const u32 experts = args.layout.experts_per_rank, begin = op.rank() * experts;
    const u32 node_experts = args.layout.experts_per_node(), node_begin = begin / node_experts * node_experts;
    u32 all_here = 0, all_in_node = 0;
    for (u32 base = 0; base < wire::kUnitTokens; base += device::kWarpSize) {
        const u32 bit = base + device::lane(), at = unit * wire::kUnitTokens + bit, token = window.first + at;
        bool here = false, in_node = false;
        if (token < tokens) {
            const TokenIds<Shape> ids(routed, shape, token);
            here = ids.chooses_any(begin, experts);
            in_node = node_experts == experts ? here : ids.chooses_any(node_begin, node_experts);
#pragma unroll
            for (u32 k = 0; k < shape.topk(); ++k) {
                const u32 expert = ids.chosen(k, begin, experts);
                window.chosen[at * shape.topk() + k] = static_cast<u16>(expert);
                // Each adds a distinct bit, so the sum is the set.
                if (expert != wire::kNoExpert) {
                    device::add_relaxed<Scope::kBlock>(&window.marks[expert * kWindowUnits + unit], 1u << bit);
                }
            }
        }
        all_here |= __ballot_sync(device::kFullMask, here && share.has(token)) << base;
        all_in_node |= __ballot_sync(device::kFullMask, in_node) << base;
    }
    if (device::lane() == 0) {
        window.here[unit] = all_here;
        window.in_node[unit] = all_in_node;
    }
}

// The block: finds which of a window's tokens have rows here, for which experts, and where these rows begin. A source's
// windows follow one another, from its first one to the last one that the block shares in.
template <class Shape>
DEEP_EP_DEVICE bool look_at(const DispatchArgs& args, Operation& op, const Shape& shape, const DispatchScratch& scratch,
                            const Window& window, const Window& next, u32 source, const TokenShare& share) {
    const u32 experts = args.layout.experts_per_rank;
    const Routed routed = routed_of(args, op, source, shape.topk());
    for (u32 unit = device::warp(); unit < kWindowUnits; unit += device::warps()) {
        mark_unit(args, op, shape, routed, window, unit, share, scratch.sources[source].tokens);
    }
    if (!op.sync_block()) return false;  // the marks are set, and all warps have left the previous window
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) {
        u32* const offsets = scratch.offsets + e * kOffsets;
        u32 at = window.first == 0 ? scratch.starts[source * experts + e] : offsets[kWindowUnits];
        for (u32 unit = 0; unit < kWindowUnits; ++unit) {
            offsets[unit] = at;
            at += static_cast<u32>(__popc(window.marks[e * kWindowUnits + unit]));
            next.marks[e * kWindowUnits + unit] = 0;
        }
        offsets[kWindowUnits] = at;
    }
    for (u32 at = threadIdx.x; at < kWindowTokens; at += blockDim.x) {
        if ((window.here[at / wire::kUnitTokens] >> at % wire::kUnitTokens & 1) == 0) continue;
        scratch.list[count_below(window.here, at)] = static_cast<u16>(at);
    }
    return op.sync_block();  // the offsets and the list are complete
}

// A warp's lanes' words of the scales of a row. Scales begin at a multiple of 4 bytes, and a row has room for their
// last word.
class RowScales {
  public:
    DEEP_EP_DEVICE explicit RowScales(const DispatchArgs& args) : args_(args) {}

    // Begins to load the first words, before the places of the row are known. Null: they are zeros.
    DEEP_EP_DEVICE void load(const u8* from) {
        from_ = reinterpret_cast<const u32*>(from);
        load_batch(device::lane());
    }
    // Stores them into the columns of the outputs, as words of 4 bytes.
    DEEP_EP_DEVICE void store(const RowPlace* places, u32 count) {
#pragma unroll 1
        for (u32 first = device::lane();;) {
            store_batch(first, places, count);
            first += kBatch * device::kWarpSize;
            if (first >= words()) return;
            load_batch(first);
        }
    }

  private:
    static constexpr u32 kBatch = 2;  // words that a lane loads before it stores the first one

    DEEP_EP_DEVICE u32 words() const { return wire::ceil_div(args_.layout.scales_bytes, sizeof(u32)); }
    // Which bytes of a word are scales: those of the last word beyond them become zeros.
    DEEP_EP_DEVICE u32 scales_in(u32 word) const {
        const u32 left = args_.layout.scales_bytes - word * static_cast<u32>(sizeof(u32));
        return left < sizeof(u32) ? (1u << 8 * left) - 1 : ~0u;
    }
    DEEP_EP_DEVICE void load_batch(u32 first) {
#pragma unroll
        for (u32 b = 0; b < kBatch; ++b) {
            const u32 i = first + b * device::kWarpSize;
            loaded_[b] = from_ != nullptr && i < words() ? from_[i] : 0;
        }
    }
    DEEP_EP_DEVICE void store_batch(u32 first, const RowPlace* places, u32 count) {
#pragma unroll
        for (u32 b = 0; b < kBatch; ++b) loaded_[b] &= scales_in(first + b * device::kWarpSize);
#pragma unroll 1
        for (u32 n = 0; n < count; ++n) {
            const u64 column = static_cast<u64>(places[n].expert) * words() + first;
            u32* const place = args_.recv_scales + column * args_.scales_stride + places[n].row;
#pragma unroll
            for (u32 b = 0; b < kBatch; ++b) {
                const u32 i = first + b * device::kWarpSize;
                if (i < words()) place[u64{b} * device::kWarpSize * args_.scales_stride] = loaded_[b];
            }
        }
    }

    const DispatchArgs& args_;
    const u32* from_ = nullptr;
    u32 loaded_[kBatch] = {};
};

// A warp: keeps a unit's choices and their weights for the combine, for a source whose results this rank sums.
DEEP_EP_DEVICE_CALL void keep_unit(const DispatchArgs& args, const Operation& op, const Routed& routed,
                                   const DispatchScratch& scratch, u32 source, u32 unit) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 tokens = scratch.sources[source].tokens, end = min(tokens, (unit + 1) * wire::kUnitTokens);
    const u8* const message = op.local_region() + layout.routing(source);
    const auto* const weights = reinterpret_cast<const float*>(message + layout.weights_offset(tokens));
    const u64 kept = layout.node_of(source) * layout.max_results();
    for (u32 choice = unit * wire::kUnitTokens * routed.topk + device::lane(); choice < end * routed.topk;
         choice += device::kWarpSize) {
        args.origins.forwarded_ids[kept + choice] = routed.ids(choice);
        args.origins.forwarded_weights[kept + choice] = weights[choice];
    }
}

// The rank of this node that receives the puts of a source that is not mapped.
DEEP_EP_DEVICE u32 receiver_of(const DispatchArgs& args, const Operation& op, u32 source) {
    return args.layout.forwarder(args.layout.node_of(op.rank()), source);
}
// The kind of the word that signals such a put: the source's own, or one of the forwarder's.
DEEP_EP_DEVICE u32 put_word(const DispatchArgs& args, const Operation& op, u32 source, u32 part) {
    return (receiver_of(args, op, source) == op.rank() ? wire::kChunk : wire::kStreamChunk) + part;
}

// One thread: waits for such a put.
DEEP_EP_DEVICE bool await_put(const DispatchArgs& args, Operation& op, u32 source, u32 part) {
    const u32 forwarder = receiver_of(args, op, source), kind = put_word(args, op, source, part);
    if (forwarder == op.rank()) return op.wait_signal(Phase::kChunk, kind, source, 1);
    return op.wait_word(Phase::kForwarded, static_cast<i32>(forwarder), op.word(kind, source),
                        op.target(kind, source, 1));
}

// A warp: waits for a source's rows, or for those of one of its puts, and returns whether they have arrived. `timed`:
// the caller learns how long it took.
DEEP_EP_DEVICE bool await_rows(const DispatchArgs& args, Operation& op, u32 source, u32 part, bool timed) {
    bool here = true;
    if (device::lane() == 0) {
        const u64 begin = timed ? device::now_ns() : 0;
        if (!op.maps(source)) {
            here = await_put(args, op, source, part);
        } else {
            here = (!op.failed() && op.has_arrived(wire::kData, source, 1)) ||
                   op.wait_signal(Phase::kData, wire::kData, source, 1);
        }
        if (timed) add_wait(args, source, begin);
    }
    return broadcast(here) != 0;
}

// A warp's part of the placing of a source's rows.
template <class Shape>
struct RowPlacing {
    const DispatchArgs& args;
    Operation& op;
    const Shape& shape;
    const DispatchScratch& scratch;
    device::RowCopies& copies;
    const u32 source;
    const bool mapped;
    const u8* const rows;
    // Of a source that is not mapped: the put that the warp has waited for, and its rows in this node in earlier
    // windows.
    u32 part = ~0u, earlier_rows = 0;
    bool here = false;

    // The rows of a mapped source are read where it wrote them, the rows of other sources where they arrived in this
    // node. These places are overwritten only after all ranks have given back this use of their regions, which follows
    // these loads (P4).
    DEEP_EP_DEVICE RowPlacing(const DispatchArgs& args, Operation& op, const Shape& shape,
                              const DispatchScratch& scratch, device::RowCopies& copies, u32 source)
        : args(args),
          op(op),
          shape(shape),
          scratch(scratch),
          copies(copies),
          source(source),
          mapped(op.maps(source)),
          rows(fabric::address(
              op.peers(), mapped ? source : receiver_of(args, op, source),
              op.region_offset() + (mapped ? args.layout.own_rows() : args.layout.rows(args.layout.node_of(source))))) {
    }

    // Waits for the rows of a put, once. False: they do not come, since the operation has failed. If the source has
    // been masked since its routing arrived, zeros take its rows' places (P17).
    DEEP_EP_DEVICE bool await(u32 wanted, bool timed) {
        if (part != wanted) {
            part = wanted;
            here = await_rows(args, op, source, part, timed);
            if (here) copies.read_what_came();
        }
        return here || broadcast(op.masked(source));
    }

    DEEP_EP_DEVICE u32 part_of(u32 token) const { return mapped ? 0 : token / args.layout.tokens_per_put(); }
    DEEP_EP_DEVICE const u8* row_of(const Window& window, u32 at) const {
        u32 row = window.first + at;
        if (!mapped) {
            const u32 of_put = args.layout.tokens_per_put(), first = row / of_put * of_put;
            const bool began_before = first < window.first;
            row = first + (began_before ? earlier_rows : 0) + count_below(window.in_node, at) -
                  (began_before ? 0 : count_below(window.in_node, first - window.first));
        }
        return rows + row * args.layout.row_bytes();
    }

    // Places this warp's rows of a window: of those in the block's list, every warps()-th.
    DEEP_EP_DEVICE void place(const Window& window) {
        const u32 count = count_below(window.here, kWindowTokens), step = device::warps();
        bool loaded = false;  // the row is on its way
        for (u32 i = device::warp(); i < count; i += step) {
            const u32 at = scratch.list[i];
            if (!await(part_of(window.first + at), false)) return;
            if (here && !loaded) copies.load(row_of(window, at), args.layout.x_bytes);
            // The next row is loaded while the places of this one are found. It has arrived if it came with this one.
            const u32 next = i + step < count ? scratch.list[i + step] : at;
            loaded = here && next != at && part_of(window.first + next) == part;
            if (loaded) copies.load(row_of(window, next), args.layout.x_bytes);
            place_row(window, at);
        }
    }
    // Notes how many rows of an unfinished put the window had.
    DEEP_EP_DEVICE void leave(const Window& window) {
        if (mapped) return;
        const u32 of_put = args.layout.tokens_per_put(), end = window.first + kWindowTokens;
        const u32 first = end / of_put * of_put, all = count_below(window.in_node, kWindowTokens);
        earlier_rows =
            first <= window.first ? earlier_rows + all : all - count_below(window.in_node, first - window.first);
    }

  private:
    // The number of results that this rank computes for the source's earlier tokens.
    DEEP_EP_DEVICE u32 results_before(const Window& window, u32 at) const {
        const u32 experts = args.layout.experts_per_rank;
        u32 results = 0;
        for (u32 e = device::lane(); e < experts; e += device::kWarpSize) {
            results += place_in(window, e, at) - scratch.starts[source * experts + e];
        }
        return warp_total(results);
    }
    // Where an expert's row of a token goes, or would go.
    DEEP_EP_DEVICE u32 place_in(const Window& window, u32 expert, u32 at) const {
        const u32 unit = at / wire::kUnitTokens, marks = window.marks[expert * kWindowUnits + unit];
        return scratch.offsets[expert * kOffsets + unit] +
               static_cast<u32>(__popc(marks & bits_below(at % wire::kUnitTokens)));
    }

    DEEP_EP_DEVICE void place_row(const Window& window, u32 at) {
        const u32 topk = shape.topk(), token = window.first + at;
        const u32 capacity = shape.ranks() * args.layout.max_tokens;  // rows of an expert
        const u8* const row = row_of(window, at);
        RowScales scales(args);
        if (args.layout.scales_bytes != 0) scales.load(here ? row + args.layout.x_bytes : nullptr);
        const u32 first_result = mapped ? 0 : results_before(window, at);
        u32 count = 0;
        for (u32 base = 0; base < topk; base += device::kWarpSize) {
            const u32 k = base + device::lane();
            const u32 expert = k < topk ? window.chosen[at * topk + k] : wire::kNoExpert;
            const bool goes = expert != wire::kNoExpert;
            const u32 mask = __ballot_sync(device::kFullMask, goes);
            const u32 place = count + static_cast<u32>(__popc(mask & bits_below(device::lane())));
            count += static_cast<u32>(__popc(mask));
            if (!goes) continue;
            u32 row = place_in(window, expert, at);
            if (row >= capacity) {  // counts and ids are inconsistent
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(source), capacity, row);
                row = 0;
            }
            const u64 index = static_cast<u64>(expert) * capacity + row;
            scratch.targets[place] = args.recv_x + index * args.layout.x_bytes;
            scratch.places[place] = {expert, row};
            args.origins.tokens[index] = static_cast<i32>(token);
            args.origins.positions[index] = wire::position(source, mapped ? token * topk + k : first_result + place);
        }
        __syncwarp();  // the list is complete
        if (args.layout.scales_bytes != 0) scales.store(scratch.places, count);
        if (here) copies.to_many(scratch.targets, count, row, args.layout.x_bytes, args.streaming != 0);
        for (u32 i = 0; !here && i < count; ++i) zero_row(scratch.targets[i], args.layout.x_bytes);
        __syncwarp();  // the list has been read
    }
};

// The block: places its share of a source's rows. `windows`: windows that the block has looked at so far. False if the
// operation is given up.
template <class Shape>
DEEP_EP_DEVICE bool place_rows_of(const DispatchArgs& args, Operation& op, const Shape& shape,
                                  const DispatchScratch& scratch, device::RowCopies& copies, const TokenShare& share,
                                  u32 source, u32& windows) {
    const u32 tokens = scratch.sources[source].tokens, end = min(tokens, share.end);
    if (share.first == share.end || scratch.sources[source].takes_part == 0) return true;
    RowPlacing<Shape> placing(args, op, shape, scratch, copies, source);
    // Even without rows, for the time that the caller learns.
    if (args.waited_ns != nullptr && share.first == 0 && device::warp() == 0) placing.await(0, true);
    for (u32 first = 0; share.first < end && first < end; first += kWindowTokens) {
        const Window window = scratch.window(windows, first), next = scratch.window(++windows, 0);
        if (!look_at(args, op, shape, scratch, window, next, source, share)) return false;
        if (keeps_routing(args, op, source)) {
            const Routed routed = routed_of(args, op, source, shape.topk());
            for (u32 unit = device::warp(); unit < kWindowUnits; unit += device::warps()) {
                if (share.has(first + unit * wire::kUnitTokens)) {
                    keep_unit(args, op, routed, scratch, source, first / wire::kUnitTokens + unit);
                }
            }
        }
        placing.place(window);
        placing.leave(window);
    }
    return true;
}

// The block.
template <class Shape>
DEEP_EP_DEVICE bool place_rows(const DispatchArgs& args, Operation& op, const Shape& shape,
                               const DispatchScratch& scratch) {
    const u32 ranks = shape.ranks();
    device::RowCopies copies(scratch.copies);
    const Window window = scratch.window(0, 0);
    for (u32 i = threadIdx.x; i < args.layout.experts_per_rank * kWindowUnits; i += blockDim.x) window.marks[i] = 0;
    const BlockShare own(args, ranks);
    bool goes_on = true;
    for (u32 round = 0, known = 0, windows = 0; goes_on && known < ranks; ++round) {
        // The first warp may reach the next round while others still read its note for this one, but cannot get further
        // ahead: two notes suffice.
        u32* const noted = scratch.known + round % 2;
        if (device::warp() == 0) {
            const u32 taken = take_routings(args, op, scratch.sources, ranks, known);
            __syncwarp();  // the sources have been stored
            find_starts(args, op, scratch, ranks, known, taken);
            if (device::lane() == 0) *noted = taken;
        }
        goes_on = op.sync_block();
        op.ended(Stage::kRoutings);
        for (const u32 end = goes_on ? *noted : known; goes_on && known < end; ++known) {
            goes_on = place_rows_of(args, op, shape, scratch, copies, own.of(known), known, windows);
        }
    }
    copies.finish();
    op.ended(Stage::kPlace);
    return goes_on;
}

// The block.
template <class Shape>
DEEP_EP_DEVICE void receive_dispatch(const DispatchArgs& args, Operation& op, const Shape& shape,
                                     const DispatchScratch& scratch) {
    if (!place_rows(args, op, shape, scratch)) return;
    // Only one block, while others still place rows. A kernel launched for this half alone has no block that sent last.
    if ((args.phases & kSend) != 0 ? op.sent_last() : blockIdx.x == 0) op.quiet();
    if (!op.last_warp_to_finish()) return;
    for (u32 e = device::lane(); args.stats != nullptr && e < args.layout.experts_per_rank; e += device::kWarpSize) {
        args.stats[e] += static_cast<i32>(scratch.ends[e]);
    }
    // This includes words for which no row was waited.
    for (u32 r = device::lane(); r < shape.ranks(); r += device::kWarpSize) {
        if (scratch.sources[r].takes_part == 0) continue;
        op.consume(wire::kNotify, r, 1);
        if (op.maps(r)) {
            if (op.wait_signal(Phase::kData, wire::kData, r, 1)) op.consume(wire::kData, r, 1);
            continue;
        }
        for (u32 part = 0; part < args.layout.row_puts; ++part) {
            if (await_put(args, op, r, part)) op.consume(put_word(args, op, r, part), r, 1);
        }
    }
    op.finish_warp(false);
}

}  // namespace deep_ep::low_latency
