// The sending half of a low-latency dispatch: sends this rank's routing to every rank, then its rows.
//
// Mapped ranks read the rows in place; all blocks together write each row once into this rank's region. For the
// forwarder of another node, one block gathers the rows of one put contiguously. No block waits for another.
#pragma once

#include "kernels/low_latency/dispatch_args.h"

namespace deep_ep::low_latency {

// The caller's ids. An invalid id counts as none, and the host reports it at its next call.
struct GivenIds {
    const DispatchArgs& args;
    u32 experts;

    DEEP_EP_DEVICE u32 operator()(u64 choice) const {
        const i64 id = args.topk_idx.get(choice);
        if (id == -1) return wire::kNoExpert;
        if (static_cast<u64>(id) < experts) return static_cast<u32>(id);
        // This rank's host loads it. Any wrong id will do, and nothing else must be visible with it: relaxed.
        device::store_relaxed<Scope::kSystem>(args.wrong_id, id);
        return wire::kNoExpert;
    }
};
using Given = Choices<GivenIds>;

template <class Shape>
DEEP_EP_DEVICE Given given_to(const DispatchArgs& args, const Shape& shape) {
    return {{args, args.layout.experts_per_rank * shape.ranks()}, shape.topk()};
}

// The message that tells a rank the destinations of this rank's tokens, where it is built and where it goes.
struct RoutingPlace {
    u64 target, staged;  // offsets in the receiver's heap, and in this rank's if the receiver is not mapped
    bool mapped, weighs;
    u8* message;

    DEEP_EP_DEVICE RoutingPlace(const DispatchArgs& args, const Operation& op, u32 to)
        : target(op.region_offset() + args.layout.routing(op.rank())),
          staged(op.region_offset() + args.layout.routing_send(to)),
          mapped(op.maps(to)),
          weighs(args.layout.weighted != 0 && !mapped && args.layout.same_local_index(to, op.rank())),
          message(mapped ? fabric::address(op.peers(), to, target) : op.peers().local + staged) {}
};

// The block: writes the routing for a rank. `counts`: of the tokens of each expert.
template <class Shape>
DEEP_EP_DEVICE void write_routing(const DispatchArgs& args, const Operation& op, const Shape& shape, const u32* counts,
                                  u32 to) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 experts = layout.experts_per_rank, begin = to * experts;
    const RoutingPlace place(args, op, to);
    auto* const ids = reinterpret_cast<wire::RoutedId*>(place.message + layout.ids_offset());
    auto* const weights = reinterpret_cast<float*>(place.message + layout.weights_offset(args.tokens));
    const Given given = given_to(args, shape);
    for (u32 choice = threadIdx.x; choice < args.tokens * shape.topk(); choice += blockDim.x) {
        ids[choice] = static_cast<wire::RoutedId>(given.ids(choice));
        if (place.weighs) weights[choice] = args.topk_weights[choice];
    }
    auto* const sent = reinterpret_cast<u32*>(place.message + sizeof(wire::RoutingHeader));
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) sent[e] = counts[begin + e];
    if (device::warp() != to % device::warps()) return;
    u32 before = 0;
    for (u32 e = device::lane(); e < begin; e += device::kWarpSize) before += counts[e];
    before = warp_total(before);
    if (device::lane() != 0) return;
    wire::RoutingHeader header{};
    header.operation = op.number();
    header.arguments = op.arguments();
    header.tokens = args.tokens;
    header.first_result = before;
    *reinterpret_cast<wire::RoutingHeader*>(place.message) = header;
}

// A warp, after a barrier that follows write_routing(): tells the rank, or posts the message.
DEEP_EP_DEVICE void send_routing(const DispatchArgs& args, Operation& op, u32 to) {
    const RoutingPlace place(args, op, to);
    if (place.mapped) {
        if (device::lane() == 0) op.signal(to, wire::kNotify);
        return;
    }
    const fabric::Piece piece{
        place.staged, place.target,
        place.weighs ? args.layout.routing_bytes(args.tokens) : args.layout.weights_offset(args.tokens)};
    op.put_signal(to, wire::kNotify, &piece, 1);
}

// The block, before the operation's first barrier.
DEEP_EP_DEVICE void clear_counts(u32* counts, u32 experts) {
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
}

// The block: sends its part of the routings. All of its threads build them: one warp per rank would go through all
// choices serially, before its first row.
template <class Shape>
DEEP_EP_DEVICE bool send_routings(const DispatchArgs& args, Operation& op, const Shape& shape,
                                  const DispatchScratch& scratch) {
    const u32 ranks = shape.ranks(), experts = args.layout.experts_per_rank * ranks;
    if (blockIdx.x >= ranks) return true;
    const auto receiver = [&](u32 i) { return (op.rank() + 1 + i) % ranks; };
    u32* const counts = scratch.starts;
    const Given given = given_to(args, shape);
    for (u32 token = threadIdx.x; token < args.tokens; token += blockDim.x) {
        const TokenIds<Shape> ids(given, shape, token);
#pragma unroll
        for (u32 k = 0; k < shape.topk(); ++k) {
            const u32 id = ids.chosen(k, 0, experts);
            if (id != wire::kNoExpert) device::add_relaxed<Scope::kBlock>(&counts[id], 1u);
        }
    }
    if (!op.sync_block()) return false;  // the counts are complete
    for (u32 i = blockIdx.x; i < ranks; i += gridDim.x) {
        const u32 to = receiver(i);
        if (!op.present(to)) continue;
        // Before each message, and by one thread: others may see the rank masked at another time (P17). A rank that is
        // masked stays so, and gets no signal below either.
        if (op.masks_ranks() && !__syncthreads_or(threadIdx.x == 0 && op.may_send(to))) continue;
        write_routing(args, op, shape, counts, to);
    }
    if (!op.sync_block()) return false;  // all threads' stores come before any warp's release or post
    for (u32 i = blockIdx.x + gridDim.x * device::warp(); i < ranks; i += gridDim.x * device::warps()) {
        if (op.present(receiver(i))) send_routing(args, op, receiver(i));
    }
    return true;
}

// A warp: device::warp_cast_e4m3, once in the kernel.
DEEP_EP_DEVICE_CALL void cast_row(u8* place, const u8* x, u32 elements, Scales scales, u32 part, u32 parts) {
    device::warp_cast_e4m3(place, x, elements, scales, part, parts);
}

// A warp: writes a token's row, or one of `parts` parts of it, in the format in which it is sent.
template <class Shape>
DEEP_EP_DEVICE void write_row(const DispatchArgs& args, const Shape& shape, u8* place, u32 token, u32 part = 0,
                              u32 parts = 1) {
    const u8* const x = args.x + static_cast<u64>(token) * shape.row_bytes();
    if (args.scales == Scales::kNone) {
        const PartOfRow mine(shape.row_bytes(), part, parts);
        device::warp_copy(place + mine.begin, x + mine.begin, mine.bytes());
    } else {
        cast_row(place, x, shape.row_bytes() / static_cast<u32>(sizeof(u16)), args.scales, part, parts);
    }
}

// All warps of all blocks: write the rows for mapped ranks, which load them here once they have acquired every block's
// share of the signal.
template <class Shape>
DEEP_EP_DEVICE void write_rows(const DispatchArgs& args, Operation& op, const Shape& shape) {
    const Given given = given_to(args, shape);
    const u32 warps = gridDim.x * device::warps(), parts = parts_of_rows(warps, args.tokens);
    u8* const rows = op.local_region() + args.layout.own_rows();
    for (u32 task = spread_warp(); task < args.tokens * parts; task += warps) {
        const u32 token = task / parts;
        bool goes = false;
        for (u32 base = 0; base < given.topk; base += device::kWarpSize) {
            const u32 k = base + device::lane(), id = k < given.topk ? given.id(token, k) : wire::kNoExpert;
            const bool mapped = id != wire::kNoExpert && op.mapped(rank_of(args, id));
            goes = __any_sync(device::kFullMask, mapped) != 0 || goes;
        }
        if (goes) write_row(args, shape, rows + token * args.layout.row_bytes(), token, task % parts, parts);
    }
}

// The block: gathers the rows of one put for a node's forwarder, which is not mapped, and puts them. A put without rows
// consists of its signal alone.
template <class Shape>
DEEP_EP_DEVICE_CALL bool put_rows(const DispatchArgs& args, Operation& op, const Shape& shape, u32 node, u32 part) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 experts = layout.experts_per_node(), begin = node * experts;
    const Given given = given_to(args, shape);
    const u32 first = part * layout.tokens_per_put();
    const u32 end = min(args.tokens, first + layout.tokens_per_put());
    const u64 place = first * layout.row_bytes();
    const u64 staged = op.region_offset() + layout.rows_send(node) + place;
    u32 rows = 0;
    for (u32 unit = first / wire::kUnitTokens; unit * wire::kUnitTokens < end; ++unit) {
        u32 mask = tokens_of_unit(unit, end, [&](u32 token) { return given.chooses_any(token, begin, experts); });
        for (; mask != 0; mask &= mask - 1, ++rows) {
            if (rows % device::warps() != device::warp()) continue;
            const u32 token = unit * wire::kUnitTokens + static_cast<u32>(__ffs(static_cast<int>(mask))) - 1;
            write_row(args, shape, op.peers().local + staged + rows * layout.row_bytes(), token);
        }
    }
    if (!op.sync_block()) return false;  // all warps' rows come before the first one's put
    if (device::warp() == 0) {
        const fabric::Piece piece{staged, op.region_offset() + layout.rows(layout.node_of(op.rank())) + place,
                                  rows * layout.row_bytes()};
        op.put_signal(layout.forwarder(node, op.rank()), wire::kChunk + part, &piece, rows != 0 ? 1 : 0);
    }
    return true;
}

// A warp: finds the slots for the results of this rank's choices of experts at rank `from`, which is not mapped. They
// follow those of lower ranks, in the order of tokens and choices.
DEEP_EP_DEVICE_CALL void find_slots_at(const DispatchArgs& args, const Given& given, u32 from) {
    const u32 experts = args.layout.experts_per_rank, begin = from * experts, topk = given.topk;
    const u32 choices = args.tokens * topk;
    u32 before = 0;
    for (u32 choice = device::lane(); choice < choices; choice += device::kWarpSize) {
        before += given.chooses(choice / topk, choice % topk, 0, begin);
    }
    u32 slot = static_cast<u32>(args.layout.max_results()) + warp_total(before);
    for (u32 base = 0; base < choices; base += device::kWarpSize) {
        const u32 choice = base + device::lane();
        const bool here = choice < choices && given.chooses(choice / topk, choice % topk, begin, experts);
        const u32 mask = __ballot_sync(device::kFullMask, here);
        const u32 own = slot + static_cast<u32>(__popc(mask & bits_below(device::lane())));
        if (here) args.origins.own_slots[choice] = wire::position(from, own);
        slot += static_cast<u32>(__popc(mask));
    }
    __syncwarp();  // the slots of experts' first mentions have been stored
    for (u32 choice = device::lane(); choice < choices; choice += device::kWarpSize) {
        const u32 token = choice / topk, k = choice % topk;
        if (given.id(token, k) - begin >= experts || given.first(token, k) == k) continue;
        args.origins.own_slots[choice] = args.origins.own_slots[token * topk + given.first(token, k)];
    }
}

// A warp: maps this rank's tokens to the sums from a node. The sums are in the order of the tokens that have an expert
// there.
DEEP_EP_DEVICE_CALL void find_sums_of(const DispatchArgs& args, const Given& given, u32 node) {
    const u32 experts = args.layout.experts_per_node();
    u32 slot = 0;
    for (u32 base = 0; base < args.tokens; base += device::kWarpSize) {
        const u32 token = base + device::lane();
        const bool here = token < args.tokens && given.chooses_any(token, node * experts, experts);
        const u32 mask = __ballot_sync(device::kFullMask, here);
        const u32 own = slot + static_cast<u32>(__popc(mask & bits_below(device::lane())));
        if (token < args.tokens) {
            args.origins.sum_slots[static_cast<u64>(node) * args.tokens + token] = here ? own : wire::kNoPosition;
        }
        slot += static_cast<u32>(__popc(mask));
    }
}

// All warps of all blocks: find where the results of this rank's choices will arrive. This is done here, while rows are
// in transit, because the caller may overwrite the ids and the weights once this half is complete.
template <class Shape>
DEEP_EP_DEVICE void find_own_slots(const DispatchArgs& args, const Operation& op, const Shape& shape) {
    const u32 topk = shape.topk(), warps = gridDim.x * device::warps(), warp = spread_warp();
    const Given given = given_to(args, shape);
    for (u32 choice = warp * device::kWarpSize + device::lane(); choice < args.tokens * topk;
         choice += warps * device::kWarpSize) {
        const u32 token = choice / topk, id = given.id(token, choice % topk);
        const bool none = id == wire::kNoExpert || !op.present(rank_of(args, id));
        const bool in_sum = !none && args.layout.weighted != 0 && !op.maps(rank_of(args, id));
        if (none || in_sum) args.origins.own_slots[choice] = wire::kNoPosition;
        if (args.layout.weighted != 0) args.origins.own_weights[choice] = args.topk_weights[choice];
        if (!none && op.maps(rank_of(args, id))) {
            args.origins.own_slots[choice] =
                wire::position(rank_of(args, id), token * topk + given.first(token, choice % topk));
        }
    }
    for (u32 node = warp; kForwards && args.layout.weighted != 0 && node < args.layout.nodes(); node += warps) {
        find_sums_of(args, given, node);
    }
    for (u32 from = warp; args.layout.weighted == 0 && from < shape.ranks(); from += warps) {
        if (op.present(from) && !op.maps(from)) find_slots_at(args, given, from);
    }
}

// The block. Each rank starts at its next rank, so that not all ranks send to the same one first.
template <class Shape>
DEEP_EP_DEVICE bool send_dispatch(const DispatchArgs& args, Operation& op, const Shape& shape,
                                  const DispatchScratch& scratch) {
    const u32 ranks = shape.ranks(), puts = args.layout.row_puts;
    if (!send_routings(args, op, shape, scratch)) return false;
    op.ended(Stage::kRoute);
    const u32 nodes = args.layout.nodes();
    for (u32 i = blockIdx.x; i < nodes * puts; i += gridDim.x) {
        const u32 node = (args.layout.node_of(op.rank()) + 1 + i / puts) % nodes;
        const u32 to = args.layout.forwarder(node, op.rank());
        if (op.present(to) && !op.maps(to) && !put_rows(args, op, shape, node, i % puts)) return false;
    }
    write_rows(args, op, shape);
    op.ended(Stage::kStore);
    if (!op.sync_block()) return false;  // the block's stores come before its share of each signal
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (op.mapped(r)) op.signal_share(r, wire::kData);
    }
    // This thread is not needed for the next half's first wait.
    if (threadIdx.x == blockDim.x - 1) op.end_send();
    op.ended(Stage::kSignal);
    find_own_slots(args, op, shape);
    op.ended(Stage::kKeep);
    return true;
}

}  // namespace deep_ep::low_latency
