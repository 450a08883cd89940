// The receiving half of a low-latency dispatch: places rows by expert, in the order of sources and tokens.
//
// Where a source's rows begin depends only on the routings of all sources before it. Therefore its rows can be placed
// once these routings and its own rows have arrived, while rows of later sources may still be in transit.
#pragma once

#include "kernels/common/zero_row.h"
#include "kernels/low_latency/dispatch_args.h"

namespace deep_ep::low_latency {

DEEP_EP_DEVICE Routed routed_of(const DispatchArgs& args, const Operation& op, u32 source, u32 topk) {
    const u8* const message = op.local_region() + args.layout.routing(source);
    return {{reinterpret_cast<const wire::RoutedId*>(message + args.layout.ids_offset())}, topk};
}

// One thread: takes the routing of a source that has arrived or is masked.
DEEP_EP_DEVICE Source take_routing(const DispatchArgs& args, Operation& op, u32 source) {
    if (!op.takes_part(source)) return {};
    const auto header = copy_once<wire::RoutingHeader>(op.local_region() + args.layout.routing(source));
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

// The first warp: waits for the routing of source `known`, and takes all routings after it that have arrived without a
// gap. Returns the first source whose routing is not known.
DEEP_EP_DEVICE u32 take_routings(const DispatchArgs& args, Operation& op, Source* sources, u32 ranks, u32 known) {
    if (device::lane() == 0 && op.present(known)) {
        const bool timed = args.waited_ns != nullptr && blockIdx.x == 0;
        const u64 begin = timed ? device::now_ns() : 0;
        op.wait_signal(Phase::kNotify, wire::kNotify, known, 1);
        if (timed) add_wait(args, known, begin);
    }
    for (u32 base = known; base < ranks; base += device::kWarpSize) {
        const u32 source = base + device::lane();
        bool here = source < ranks;
        if (here && op.present(source)) {
            here = op.has_arrived(wire::kNotify, source, 1) || op.masked(source);
            if (here) sources[source] = take_routing(args, op, source);
        } else if (here) {
            sources[source] = {};
        }
        const u32 mask = __ballot_sync(device::kFullMask, here);
        if (mask != device::kFullMask) return base + static_cast<u32>(__ffs(static_cast<int>(~mask))) - 1;
    }
    return ranks;
}

// Returns whether this rank sums its node's results for a source, and therefore keeps the routing.
DEEP_EP_DEVICE bool keeps_routing(const DispatchArgs& args, const Operation& op, u32 source) {
    return args.layout.weighted != 0 && !op.mapped(source) && args.layout.same_local_index(op.rank(), source);
}

// The first warp, which has acquired their routings: finds where the rows of sources [from, to) begin, expert by
// expert. The first block stores the result for the caller.
DEEP_EP_DEVICE void find_starts(const DispatchArgs& args, Operation& op, const DispatchScratch& scratch, u32 ranks,
                                u32 from, u32 to) {
    const u32 experts = args.layout.experts_per_rank;
    for (u32 e = device::lane(); e < experts; e += device::kWarpSize) {
        u32 end = from == 0 ? 0 : scratch.ends[e];
        for (u32 source = from; source < to; ++source) {
            u32 count = 0;
            if (scratch.sources[source].takes_part != 0) {
                const u8* const message = op.local_region() + args.layout.routing(source);
                count = reinterpret_cast<const volatile u32*>(message + sizeof(wire::RoutingHeader))[e];
                if (count > scratch.sources[source].tokens) {
                    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(source), scratch.sources[source].tokens,
                            count);
                    count = 0;
                }
            }
            scratch.starts[source * experts + e] = end;
            if (blockIdx.x == 0) args.origins.ranges[e * ranks + source] = static_cast<i64>(end) << 32 | count;
            end += count;
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

// A warp's plan for the tokens of a unit.
struct UnitPlan {
    u32 tokens;          // tokens that have a row here, one bit each
    u32 in_node;         // tokens that have a row in this node, one bit each
    u32 rows_before;     // rows in this node of the same put, in earlier units
    u32 results_before;  // all rows placed here for the source, in earlier units
};

// A warp: marks the experts of the tokens of a unit. `marks` must be clear, and are set after a __syncwarp.
template <class Shape>
DEEP_EP_DEVICE void mark_unit(const DispatchArgs& args, const Operation& op, const Shape& shape, const Routed& routed,
                              u32* marks, u32 unit, u32 tokens, UnitPlan& plan) {
    const u32 experts = args.layout.experts_per_rank, begin = op.rank() * experts;
    const u32 node_experts = args.layout.experts_per_node(), node_begin = begin / node_experts * node_experts;
    plan.tokens = plan.in_node = 0;
    for (u32 base = 0; base < wire::kUnitTokens; base += device::kWarpSize) {
        const u32 bit = base + device::lane(), token = unit * wire::kUnitTokens + bit;
        bool here = false, in_node = false;
        if (token < tokens) {
            const TokenIds<Shape> ids(routed, shape, token);
            here = ids.chooses_any(begin, experts);
            in_node = node_experts == experts ? here : ids.chooses_any(node_begin, node_experts);
#pragma unroll
            for (u32 k = 0; k < shape.topk(); ++k) {
                const u32 expert = ids.chosen(k, begin, experts);
                // Each adds a distinct bit, so the sum is the set.
                if (expert != wire::kNoExpert) device::add_relaxed<Scope::kBlock>(&marks[expert], 1u << bit);
            }
        }
        plan.tokens |= __ballot_sync(device::kFullMask, here) << base;
        plan.in_node |= __ballot_sync(device::kFullMask, in_node) << base;
    }
}

// A warp: finds how many of the source's tokens each expert has before this unit, and which tokens it has in the unit.
// Fills scratch.offsets and scratch.marks.
template <class Shape>
DEEP_EP_DEVICE_CALL UnitPlan plan_unit(const DispatchArgs& args, const Operation& op, const Shape& shape,
                                       const Routed& routed, const DispatchScratch& scratch, u32 source, u32 unit) {
    const u32 experts = args.layout.experts_per_rank, tokens = scratch.sources[source].tokens;
    const u32 units_per_put = args.layout.tokens_per_put() / wire::kUnitTokens;
    for (u32 e = device::lane(); e < experts; e += device::kWarpSize) {
        scratch.marks[e] = 0;
        scratch.offsets[e] = scratch.starts[source * experts + e];
    }
    UnitPlan plan{};
    for (u32 u = 0; u <= unit; ++u) {
        __syncwarp();  // the marks are clear
        mark_unit(args, op, shape, routed, scratch.marks, u, tokens, plan);
        __syncwarp();  // the marks are set
        if (u == unit) break;
        if (u / units_per_put == unit / units_per_put) plan.rows_before += static_cast<u32>(__popc(plan.in_node));
        for (u32 e = device::lane(); e < experts; e += device::kWarpSize) {
            const u32 rows = static_cast<u32>(__popc(scratch.marks[e]));
            scratch.offsets[e] += rows;
            plan.results_before += rows;
            scratch.marks[e] = 0;
        }
    }
    plan.results_before = warp_total(plan.results_before);
    return plan;
}

// A warp: stores a row's scales, `bytes` of them, into the columns of the outputs, as words of 4 bytes. A null `from`
// stores zeros. Scales begin at a multiple of 4 bytes, and a row has room for their last word.
DEEP_EP_DEVICE void place_scales(const DispatchArgs& args, const u8* from, const RowPlace* places, u32 count) {
    const u32 bytes = args.layout.scales_bytes, words = wire::ceil_div(bytes, sizeof(u32));
    for (u32 i = device::lane(); i < words; i += device::kWarpSize) {
        u32 word = from != nullptr ? reinterpret_cast<const u32*>(from)[i] : 0;
        const u32 left = bytes - i * static_cast<u32>(sizeof(u32));
        if (left < sizeof(u32)) word &= (1u << 8 * left) - 1;  // bytes of the last word beyond the scales are zero
        for (u32 n = 0; n < count; ++n) {
            const u64 column = static_cast<u64>(places[n].expert) * words + i;
            args.recv_scales[column * args.scales_stride + places[n].row] = word;
        }
    }
}

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

// A warp: returns how many experts have a token of the unit.
DEEP_EP_DEVICE u32 rows_of_token(const u32* marks, u32 experts, u32 bit) {
    u32 rows = 0;
    for (u32 base = 0; base < experts; base += device::kWarpSize) {
        const u32 e = base + device::lane();
        const bool has = e < experts && (marks[e] >> bit & 1) != 0;
        rows += static_cast<u32>(__popc(__ballot_sync(device::kFullMask, has)));
    }
    return rows;
}

// A warp: places the rows of one unit of a source's tokens, or every `parts`-th of them starting at `part`. If `here`
// is false, zeros take the rows' places: the source has been masked since its routing arrived (P17).
template <class Shape>
DEEP_EP_DEVICE void place_unit(const DispatchArgs& args, Operation& op, const Shape& shape,
                               const DispatchScratch& scratch, u32 source, u32 unit, u32 part, u32 parts, bool here) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 topk = shape.topk(), experts = layout.experts_per_rank, begin = op.rank() * experts;
    const u32 capacity = shape.ranks() * layout.max_tokens;  // rows of an expert
    const Routed routed = routed_of(args, op, source, topk);
    const UnitPlan plan = plan_unit(args, op, shape, routed, scratch, source, unit);
    const bool mapped = op.mapped(source);
    // The rows of a mapped source are read where it wrote them, the rows of other sources where they arrived in this
    // node. These places are overwritten only after all ranks have given back this use of their regions, which follows
    // these loads (P4).
    const u32 holder = mapped ? source : layout.forwarder(layout.node_of(op.rank()), source);
    const u8* const rows = fabric::address(
        op.peers(), holder, op.region_offset() + (mapped ? layout.own_rows() : layout.rows(layout.node_of(source))));
    const u32 first_of_put = unit * wire::kUnitTokens / layout.tokens_per_put() * layout.tokens_per_put();
    if (part == 0 && keeps_routing(args, op, source)) keep_unit(args, op, routed, scratch, source, unit);
    u32 result = plan.results_before, turn = 0;
    for (u32 left = plan.tokens; left != 0; left &= left - 1) {
        const u32 bit = static_cast<u32>(__ffs(static_cast<int>(left))) - 1, token = unit * wire::kUnitTokens + bit;
        const u32 row_of_put = plan.rows_before + static_cast<u32>(__popc(plan.in_node & bits_below(bit)));
        const u8* const row = rows + (mapped ? token : first_of_put + row_of_put) * layout.row_bytes();
        const bool mine = turn++ % parts == part;
        if (!mine) {  // only how many results it has matters here
            if (!mapped) result += rows_of_token(scratch.marks, experts, bit);
            continue;
        }
        const TokenIds<Shape> ids(routed, shape, token);
        u32 count = 0;
        for (u32 base = 0; base < topk; base += device::kWarpSize) {
            const u32 k = base + device::lane();
            const u32 expert = k < topk ? ids.chosen_by_lane(k, begin, experts) : wire::kNoExpert;
            const bool goes = expert != wire::kNoExpert;
            const u32 mask = __ballot_sync(device::kFullMask, goes);
            const u32 place = count + static_cast<u32>(__popc(mask & bits_below(device::lane())));
            count += static_cast<u32>(__popc(mask));
            if (!goes) continue;
            u32 at = scratch.offsets[expert] + static_cast<u32>(__popc(scratch.marks[expert] & bits_below(bit)));
            if (at >= capacity) {  // counts and ids are inconsistent
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(source), capacity, at);
                at = 0;
            }
            const u64 index = static_cast<u64>(expert) * capacity + at;
            scratch.targets[place] = args.recv_x + index * layout.x_bytes;
            scratch.places[place] = {expert, at};
            args.origins.tokens[index] = static_cast<i32>(token);
            args.origins.positions[index] = wire::position(source, mapped ? token * topk + k : result + place);
        }
        result += count;
        __syncwarp();  // the list is complete
        if (here) device::warp_copy_to_many(scratch.targets, count, row, layout.x_bytes, args.streaming != 0);
        for (u32 i = 0; !here && i < count; ++i) zero_row(scratch.targets[i], args.layout.x_bytes);
        if (layout.scales_bytes != 0) place_scales(args, here ? row + layout.x_bytes : nullptr, scratch.places, count);
        __syncwarp();  // the list has been read
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

// A warp: waits for the rows of a unit of a source's tokens, and returns whether they have arrived. `first` is true if
// no other warp waits for the source's first unit.
DEEP_EP_DEVICE bool await_rows(const DispatchArgs& args, Operation& op, u32 source, u32 unit, bool first) {
    bool here = true;
    if (device::lane() == 0) {
        const u32 part = unit * wire::kUnitTokens / args.layout.tokens_per_put();
        const u64 begin = args.waited_ns != nullptr ? device::now_ns() : 0;
        here = op.mapped(source) ? op.wait_signal(Phase::kData, wire::kData, source, 1)
                                 : await_put(args, op, source, part);
        if (args.waited_ns != nullptr && first) add_wait(args, source, begin);
    }
    return broadcast(here) != 0;
}

// The block.
template <class Shape>
DEEP_EP_DEVICE bool place_rows(const DispatchArgs& args, Operation& op, const Shape& shape,
                               const DispatchScratch& scratch) {
    const u32 ranks = shape.ranks(), units = wire::ceil_div(args.layout.max_tokens, wire::kUnitTokens);
    const u32 warps = gridDim.x * device::warps();
    const u32 parts = parts_of_unit(warps, ranks * units);
    // The assignment of units to warps must not depend on what has arrived, since other blocks may have seen more of
    // it.
    u32 known = 0, task = blockIdx.x * device::warps() + device::warp();
    for (u32 round = 0; known < ranks; ++round) {
        // The first warp may reach the next round while others still read its note for this one, but cannot get further
        // ahead: two notes suffice.
        u32* const noted = scratch.known + round % 2;
        if (device::warp() == 0) {
            const u32 taken = take_routings(args, op, scratch.sources, ranks, known);
            __syncwarp();  // the sources have been stored
            find_starts(args, op, scratch, ranks, known, taken);
            if (device::lane() == 0) *noted = taken;
        }
        if (!op.sync_block()) return false;
        const u32 next = *noted;
        for (; task < next * units * parts; task += warps) {
            const u32 source = task / parts / units, unit = task / parts % units, part = task % parts;
            if (scratch.sources[source].takes_part == 0) continue;
            if (unit != 0 && unit * wire::kUnitTokens >= scratch.sources[source].tokens) continue;
            const bool first = unit == 0 && part == 0;
            const bool here = await_rows(args, op, source, unit, first);
            if (here || broadcast(op.masked(source))) {
                place_unit(args, op, shape, scratch, source, unit, part, parts, here);
            }
        }
        known = next;
    }
    return true;
}

// The block.
template <class Shape>
DEEP_EP_DEVICE void receive_dispatch(const DispatchArgs& args, Operation& op, const Shape& shape,
                                     const DispatchScratch& scratch) {
    if (!place_rows(args, op, shape, scratch)) return;
    // Only one block, while others still place rows. A kernel launched for this half alone has no block that sent last.
    if ((args.phases & kSend) != 0 ? op.sent_last() : blockIdx.x == 0) op.quiet();
    if (!op.last_warp(kFinished)) return;
    for (u32 e = device::lane(); args.stats != nullptr && e < args.layout.experts_per_rank; e += device::kWarpSize) {
        args.stats[e] += static_cast<i32>(scratch.ends[e]);
    }
    // This includes words for which no row was waited.
    for (u32 r = device::lane(); r < shape.ranks(); r += device::kWarpSize) {
        if (scratch.sources[r].takes_part == 0) continue;
        op.consume(wire::kNotify, r, 1);
        if (op.mapped(r)) {
            if (op.wait_signal(Phase::kData, wire::kData, r, 1)) op.consume(wire::kData, r, 1);
            continue;
        }
        for (u32 part = 0; part < args.layout.row_puts; ++part) {
            if (await_put(args, op, r, part)) op.consume(put_word(args, op, r, part), r, 1);
        }
    }
    op.finish_warp();
}

}  // namespace deep_ep::low_latency
