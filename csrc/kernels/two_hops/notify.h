// notify: the first kernel of a dispatch in two hops. It numbers this rank's node rows, takes the operation's number
// and exchanges counts: first with the ranks that forward for it in other nodes, then inside the node. If the dispatch
// is finished later, `counts` performs the receiving half of that exchange.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/shape.h"
#include "kernels/normal/check_ids.h"
#include "kernels/normal/counts.h"
#include "kernels/two_hops/number.h"
#include "kernels/two_hops/offers.h"

namespace deep_ep::two_hops {

// Copied at launch. Pointers are device pointers.
struct NotifyArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::TwoHopLayout layout;
    u64 arguments;  // hash of what all ranks must agree on
    u32 tokens;
    u32 max_rows;                  // that any rank may receive, the same on all ranks; 0: no limit
    u32 finish_later;              // this kernel does not wait for the peers' counts: `counts` follows
    const u8* is_token_in_rank;    // [tokens, ranks]
    const i32* tokens_per_expert;  // [experts]
    u32 checks_ids;                // the layout may not be that of the ids
    ExpertIds topk_idx;            // [tokens, topk] the ids that are sent
    Divider experts_per_rank;
    Plan plan;
    i32* rows_per_expert;  // [experts / ranks] host-visible: rows received for each local expert
    ReceivedCounts received;
    u64 heap_bytes;  // heap size that this rank announces (P10)
    u64* heaps;      // [ranks] host-visible: size that each rank has announced; null if the host does not wait
};

struct NotifyShared {
    SharedArray<u32> rows;
    SharedArray<i32> choices;  // of each expert, by the block that checks the ids
    u32 bytes;

    constexpr explicit NotifyShared(const BlockSizes& block, SharedCut cut = {})
        : rows(cut.take<u32>(block.warps * block.per_node)), choices(cut.take<i32>(block.experts)), bytes(cut.end()) {}
};

// The block: sends each forwarder the counts of this rank's row stream to its node.
DEEP_EP_DEVICE void send_rail_counts(const NotifyArgs& args, Operation& op, const Place& me) {
    const wire::TwoHopLayout& layout = args.layout;
    const u32 per_node = layout.per_node, experts = per_node * layout.experts_per_rank();
    for (u32 place = device::warp(); place < layout.others(); place += device::warps()) {
        const u32 node = layout.node_at(place, me.node), to = me.forwarder(node);
        if (to == wire::kNoRank) continue;
        u8* const message = op.local_region() + layout.rail_counts_send.at(place);
        if (device::lane() == 0) store_counts_header(op, message, static_cast<u32>(args.plan.sent[node]), 0);
        store_mask(op, message, device::lane(), device::kWarpSize);
        auto* const rows = reinterpret_cast<i32*>(message + wire::kNotifyCounts);
        auto* const to_expert = reinterpret_cast<i32*>(message + layout.rail_experts());
        for (u32 d = device::lane(); d < per_node; d += device::kWarpSize) {
            rows[d] = args.plan.rows_to_rank[node * per_node + d];
        }
        for (u32 e = device::lane(); e < experts; e += device::kWarpSize) {
            to_expert[e] = args.tokens_per_expert[node * experts + e];
        }
        // put_signal() orders the lanes' stores before the message.
        const u32 theirs = layout.place(me.role(to, op.rank()), me.node, node);
        const u64 target = op.region_offset() + layout.rail_counts.at(theirs);
        const fabric::Piece piece{op.region_offset() + layout.rail_counts_send.at(place), target,
                                  layout.rail_counts_bytes()};
        op.put_signal(to, wire::kNotify, &piece, 1);
    }
}

// The message of a line from another node.
DEEP_EP_DEVICE const u8* rail_message(const NotifyArgs& args, const Operation& op, const Place& me, u32 line) {
    const wire::TwoHopLayout& layout = args.layout;
    const u32 place = layout.place(layout.role_of(line), layout.node_of(line), me.node);
    return op.local_region() + layout.rail_counts.at(place);
}

// The block: waits for the counts of the row streams from other nodes.
DEEP_EP_DEVICE bool receive_rail_counts(const NotifyArgs& args, Operation& op, const Place& me) {
    const wire::TwoHopLayout& layout = args.layout;
    for (u32 line = threadIdx.x; line < layout.lines(); line += blockDim.x) {
        const u32 source = me.origin(line);
        if (source == op.rank() || source == wire::kNoRank) {
            args.plan.forwarded[line] = source == op.rank() ? args.plan.sent[line] : 0;
            continue;
        }
        if (!op.wait_signal(Phase::kNotify, wire::kNotify, source, 1)) continue;
        wire::NotifyHeader header;
        if (!check_counts(op, source, rail_message(args, op, me, line), header)) continue;
        args.plan.forwarded[line] = static_cast<i32>(header.tokens);
        op.consume(wire::kNotify, source, 1);
    }
    return op.sync_block();
}

// The block: sends each rank of the node the counts of this rank's lines.
DEEP_EP_DEVICE bool send_local_counts(const NotifyArgs& args, Operation& op, const Place& me) {
    const wire::TwoHopLayout& layout = args.layout;
    const u32 lines = layout.lines(), per_node = layout.per_node, experts = layout.experts_per_rank();
    const auto message = [&](u32 local) {
        // Inside a node all ranks are mapped.
        return fabric::address(op.peers(), me.near(local), op.region_offset() + layout.local_counts.at(me.local));
    };
    for (u32 d = device::warp(); d < per_node; d += device::warps()) {
        if (!me.has(d)) continue;
        if (device::lane() == 0) store_counts_header(op, message(d), 0, args.heap_bytes);
        store_mask(op, message(d), device::lane(), device::kWarpSize);
    }
    for (u32 i = threadIdx.x; i < per_node * lines; i += blockDim.x) {
        const u32 d = i / lines, line = i % lines, origin = me.origin(line);
        if (!me.has(d)) continue;
        const u32 node_rows = static_cast<u32>(args.plan.forwarded[line]);
        i32 rows = origin == op.rank() ? args.plan.rows_to_rank[me.near(d)] : 0;
        if (origin != op.rank() && origin != wire::kNoRank) {
            rows = bounded_count(op, origin, count_at(rail_message(args, op, me, line) + wire::kNotifyCounts, d),
                                 node_rows);
        }
        reinterpret_cast<i32*>(message(d) + wire::kNotifyCounts)[line] = rows;
        reinterpret_cast<i32*>(message(d) + layout.local_node_rows())[line] = static_cast<i32>(node_rows);
    }
    for (u32 i = threadIdx.x; i < per_node * experts; i += blockDim.x) {
        const u32 d = i / experts, e = i % experts;
        if (!me.has(d)) continue;
        i32 sum = args.tokens_per_expert[me.near(d) * experts + e];
        for (u32 line = 0; line < lines; ++line) {
            const u32 origin = me.origin(line);
            if (origin == op.rank() || origin == wire::kNoRank) continue;
            const u8* const counts = rail_message(args, op, me, line) + layout.rail_experts();
            sum += bounded_count(op, origin, count_at(counts, i), 0x7fffffffu - static_cast<u32>(sum));
        }
        reinterpret_cast<i32*>(message(d) + layout.local_experts())[e] = sum;
    }
    if (!op.sync_block()) return false;  // the whole block's stores come before each thread's release
    for (u32 d = threadIdx.x; d < per_node; d += blockDim.x) {
        if (me.has(d)) op.signal(me.near(d), wire::kNotify);
    }
    return true;
}

// The block: waits for the counts of all forwarders of this node.
DEEP_EP_DEVICE bool receive_local_counts(const NotifyArgs& args, Operation& op, const Place& me) {
    for (u32 r = threadIdx.x; args.heaps != nullptr && r < op.ranks(); r += blockDim.x) {
        if (r / me.per_node != me.node || !op.present(r)) args.heaps[r] = 0;
    }
    for (u32 f = threadIdx.x; f < me.per_node; f += blockDim.x) {
        const u32 forwarder = me.near(f);
        if (!me.has(f)) continue;
        if (!op.wait_signal(Phase::kNotify, wire::kNotify, forwarder, 1)) continue;
        wire::NotifyHeader header;
        if (!check_counts(op, forwarder, op.local_region() + args.layout.local_counts.at(f), header)) continue;
        if (args.heaps != nullptr) args.heaps[forwarder] = header.heap_bytes;  // read after `counts_ready`
        op.consume(wire::kNotify, forwarder, 1);
    }
    return op.sync_block();
}

// The block: finds where each source's rows end here, and what this rank receives and forwards.
DEEP_EP_DEVICE void make_plan(const NotifyArgs& args, Operation& op, const Place& me) {
    static_assert(u64{wire::kMaxTokens} * wire::kMaxRanks <= 0x7fffffff, "rows of a rank fit into 31 bits");
    const wire::TwoHopLayout& layout = args.layout;
    for (u32 s = threadIdx.x; s < op.ranks(); s += blockDim.x) {
        args.plan.node_rows[s] = args.plan.rank_prefix[s] = 0;
        if (!op.present(s)) continue;
        const u32 forwarder = me.near_forwarder(s);
        const u32 line = me.role(forwarder, s) * layout.nodes + s / me.per_node;
        const u8* const message = op.local_region() + layout.local_counts.at(forwarder % me.per_node);
        const i32 node_rows =
            bounded_count(op, forwarder, count_at(message + layout.local_node_rows(), line), wire::kMaxTokens);
        args.plan.node_rows[s] = node_rows;
        args.plan.rank_prefix[s] =
            bounded_count(op, forwarder, count_at(message + wire::kNotifyCounts, line), static_cast<u32>(node_rows));
    }
    for (u32 e = threadIdx.x; e < layout.experts_per_rank(); e += blockDim.x) {
        i32 sum = 0;
        for (u32 f = 0; f < me.per_node; ++f) {
            if (!me.has(f)) continue;
            const u8* const counts = op.local_region() + layout.local_counts.at(f) + layout.local_experts();
            sum += bounded_count(op, me.near(f), count_at(counts, e), 0x7fffffffu - static_cast<u32>(sum));
        }
        args.rows_per_expert[e] = sum;
        args.received.note(e, sum);
    }
    if (!op.sync_block() || device::warp() != 0) return;
    if (args.plan.rank_begin != nullptr) {
        for (u32 n = device::lane(); n < me.nodes; n += device::kWarpSize) {
            args.plan.node_forwarded[n] = args.plan.forwarded[n];
        }
        for (u32 s = device::lane(); s < op.ranks(); s += device::kWarpSize) {
            args.plan.rank_begin[s] = -args.plan.rank_prefix[s];
        }
    }
    // Where a rank's rows begin is the sum up to it less its own count, in whose place the sum is stored. Each lane
    // reads only sums that it has stored itself.
    const i32 rows = sum_up(args.plan.rank_prefix, op.ranks());
    const i32 forwarded = sum_up(args.plan.forwarded, layout.lines());
    for (u32 s = device::lane(); args.plan.rank_begin != nullptr && s < op.ranks(); s += device::kWarpSize) {
        args.plan.rank_begin[s] += args.plan.rank_prefix[s];
    }
    if (device::lane() != 0) return;
    args.call.outcome->total_rows = rows;
    args.call.outcome->forwarded_rows = forwarded;
    if (args.max_rows != 0 && static_cast<u32>(rows) > args.max_rows) {
        op.fail(wire::kOverflow, Phase::kNotify, static_cast<i32>(op.rank()), args.max_rows, static_cast<u64>(rows));
    }
}

// The block: the half of the exchange that waits for the first kernels of the peers.
DEEP_EP_DEVICE void take_counts(const NotifyArgs& args, Operation& op, const Place& me) {
    if (!receive_rail_counts(args, op, me) || !send_local_counts(args, op, me)) return;
    if (!receive_local_counts(args, op, me)) return;
    make_plan(args, op, me);
    if (!op.sync_block()) return;
    const auto rows_from = [&](u32 local) {
        i32 rows = 0;
        for (u32 s = local; s < op.ranks(); s += me.per_node) {
            rows += args.plan.rank_prefix[s] - (s == 0 ? 0 : args.plan.rank_prefix[s - 1]);
        }
        return rows;
    };
    if (device::warp() == 0) store_received(args.received, args.layout.experts_per_rank(), rows_from);
    // The host polls this flag and reads the counts once it is set. Litmus: host_flag.
    if (threadIdx.x == 0) device::store_release<Scope::kSystem>(&args.call.outcome->counts_ready, 1u);
}

// Works with any grid size. The last block to finish its part exchanges the counts, or only sends those of this rank.
template <class Shape>
DEEP_EP_KERNEL void notify(DEEP_EP_ARGUMENT const NotifyArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    const wire::TwoHopLayout& layout = args.layout;
    const Place me = Place::of(op.rank(), layout, op.environment().mask);
    const CheckedIds ids = checked_ids(args, Shape::of(args.shape).topk());
    const NotifyShared at({op.ranks(), ids.topk != 0 ? ids.experts : 0, 0, device::warps(), 0, layout.per_node});
    u32* const rows = at.rows.in(shared) + device::warp() * layout.per_node;

    if (ids.checked_here()) check_ids(op, ids, at.choices.in(shared));
    const u32 blocks = ids.numbering_blocks(), first = blockIdx.x * device::warps() + device::warp();
    for (u32 node = first; blockIdx.x < blocks && node < layout.nodes; node += blocks * device::warps()) {
        number_node_rows(op, args.plan, layout, {args.is_token_in_rank, args.tokens, op.ranks()}, node, rows);
    }
    op.ended(Stage::kNumber);
    if (!op.last_to_finish()) return;

    if (threadIdx.x == 0) op.take_number(wire::Kind::kDispatch, args.arguments);
    __syncthreads();
    op.read_number();
    if (threadIdx.x == 0) check_roles(op, layout);
    if (!op.await_free()) return;
    send_rail_counts(args, op, me);
    op.ended(Stage::kSignal);
    if (args.finish_later == 0) take_counts(args, op, me);
}

// Launched to finish a dispatch that was begun earlier. One block.
template <class Shape>
DEEP_EP_KERNEL void counts(DEEP_EP_ARGUMENT const NotifyArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    take_counts(args, op, Place::of(op.rank(), args.layout, op.environment().mask));
}

struct NotifyKernel {
    static constexpr const char* kName = "two_hops_notify";
    using Args = NotifyArgs;
    template <class Shape>
    static constexpr auto kEntry = notify<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return NotifyShared(block).bytes; }
};

struct CountsKernel : NoSharedMemory {
    static constexpr const char* kName = "two_hops_counts";
    using Args = NotifyArgs;
    template <class Shape>
    static constexpr auto kEntry = counts<Shape>;
};

}  // namespace deep_ep::two_hops
