// The work of a forwarder for a rank of another node in a low-latency combine: it sums its node's results for that
// rank's tokens, and puts the sums.
//
// The node's ranks have left their results in their own regions, in the order of tokens and choices. The forwarder
// locates them by the choices that it has kept from the dispatch.
#pragma once

#include "kernels/low_latency/combine_args.h"

namespace deep_ep::low_latency {

// Ids kept by the dispatch.
struct ForwardedIds {
    const u32* ids;

    DEEP_EP_DEVICE u32 operator()(u64 choice) const { return const_cast<const volatile u32*>(ids)[choice]; }
};
using Forwarded = Choices<ForwardedIds>;

// Experts of this rank's node.
struct NodeExperts {
    u32 begin;
    u32 count;
    u32 of_rank;

    DEEP_EP_DEVICE static NodeExperts of(const wire::LowLatencyLayout& layout, u32 rank) {
        const u32 count = layout.experts_per_node();
        return {layout.node_of(rank) * count, count, layout.experts_per_rank};
    }
    // The rank of an expert, as an index in the node.
    DEEP_EP_DEVICE u32 local(u32 id) const { return (id - begin) / of_rank; }
};

// Another node: this rank is the forwarder of its rank with the same local index.
struct ForwardedNode {
    u32 node;
    u32 source;
    u32 tokens;
    Forwarded choices;
    const float* weights;

    // Selects the tokens that have a result here, for tokens_of_unit().
    DEEP_EP_DEVICE auto in_sums(const NodeExperts& experts) const {
        return [this, experts](u32 token) { return choices.chooses_any(token, experts.begin, experts.count); };
    }
};

// One thread or all.
DEEP_EP_DEVICE ForwardedNode forwarded_node(const CombineArgs& args, Operation& op, u32 node, u32 topk) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 source = layout.forwarder(node, op.rank());
    const u64 kept = node * layout.max_results();
    ForwardedNode line{
        node, source, 0, {{args.origins.forwarded_ids + kept}, topk}, args.origins.forwarded_weights + kept};
    if (!op.present(source) || op.maps(source)) return line;
    const u32 tokens = *const_cast<const volatile u32*>(args.origins.forwarded_tokens + node);
    if (tokens <= layout.max_tokens) {
        line.tokens = tokens;
    } else {
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(source), layout.max_tokens, tokens);
    }
    return line;
}

// The block: waits until all ranks of the node have left their results.
DEEP_EP_DEVICE bool await_node(const CombineArgs& args, Operation& op) {
    const wire::LowLatencyLayout& layout = args.layout;
    for (u32 local = threadIdx.x; local < layout.per_node; local += blockDim.x) {
        const u32 from = layout.node_of(op.rank()) * layout.per_node + local;
        if (!op.present(from)) continue;
        const u64 begin = args.waited_ns != nullptr ? device::now_ns() : 0;
        if (!op.wait_signal(Phase::kResults, wire::kData, from, 1)) continue;
        if (args.waited_ns != nullptr && blockIdx.x == 0) {
            args.waited_ns[from] += static_cast<i64>(device::now_ns() - begin);
        }
        const auto header = copy_once<wire::ResultHeader>(op.local_region() + layout.header(from));
        op.check_message(Phase::kResults, from, header.operation, header.arguments);
    }
    return op.sync_block();
}

// One lane: returns how many of a token's results precede that of its k-th choice, at the same rank.
DEEP_EP_DEVICE u32 before_choice(const Forwarded& choices, const NodeExperts& experts, u32 token, u32 k) {
    const u32 first = experts.local(choices.id(token, k)) * experts.of_rank + experts.begin;
    u32 before = 0;
    for (u32 other = 0; other < k; ++other) before += choices.chooses(token, other, first, experts.of_rank);
    return before;
}

// A warp: counts the results of each rank of the node for tokens [from, to).
DEEP_EP_DEVICE void count_results(const ForwardedNode& line, const NodeExperts& experts, u32 from, u32 to,
                                  u32* before) {
    const u32 topk = line.choices.topk;
    for (u32 choice = from * topk + device::lane(); choice < to * topk; choice += device::kWarpSize) {
        const u32 token = choice / topk, k = choice % topk, id = line.choices.id(token, k);
        if (id - experts.begin >= experts.count || line.choices.first(token, k) != k) continue;
        device::add_relaxed<Scope::kBlock>(&before[experts.local(id)], 1u);
    }
    __syncwarp();  // the counts are complete
}

// A warp: sums a token's results of this node, weighted and in the order of its choices, in fp32, rounded once. The
// warp synchronizes in count_results() before the list is written again.
template <class Shape>
DEEP_EP_DEVICE void sum_in_node(const CombineArgs& args, Operation& op, const Shape& shape, const ForwardedNode& line,
                                const NodeExperts& experts, u32 token, const u32* before, u8* sum, const u8** rows,
                                float* weights) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 topk = shape.topk(), first_rank = layout.node_of(op.rank()) * layout.per_node;
    RowList list{rows, weights, topk, 0};
    for (u32 base = 0; base < topk; base += device::kWarpSize) {
        const u32 k = base + device::lane();
        const u32 id = k < topk ? line.choices.id(token, k) : wire::kNoExpert;
        const u8* row = nullptr;
        if (id - experts.begin < experts.count && op.present(first_rank + experts.local(id))) {
            const u32 local = experts.local(id), first = line.choices.first(token, k);
            const u32 index = before[local] + before_choice(line.choices, experts, token, first);
            // Loads from another rank of this node, whose blocks stored these rows before their shares of `kData`, each
            // a release at system scope. A thread here has acquired the whole unit (await_node()), and the block's
            // barrier orders all warps after it. The rows stay until this rank gives `free` (P4).
            if (index < layout.max_results_of_rank()) {
                row = fabric::address(op.peers(), first_rank + local,
                                      op.region_offset() + layout.results_send(line.source)) +
                      u64{index} * layout.result_bytes;
            } else {
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(line.source), layout.max_results_of_rank(),
                        index);
            }
        }
        list.append(row, row != nullptr ? line.weights[static_cast<u64>(token) * topk + k] : 0);
    }
    __syncwarp();  // the list is complete
    device::warp_weighted_sum_bf16(sum, rows, weights, list.count, shape.row_bytes() / static_cast<u32>(sizeof(u16)));
}

// A warp: computes the sums of every `parts`-th token of a unit, starting at `part`, among the tokens that have an
// expert here.
template <class Shape>
DEEP_EP_DEVICE_CALL void sum_unit(const CombineArgs& args, Operation& op, const Shape& shape, const ForwardedNode& line,
                                  u32 unit, u32 part, u32 parts, u32* before, const u8** rows, float* weights) {
    const auto experts = NodeExperts::of(args.layout, op.rank());
    for (u32 local = device::lane(); local < args.layout.per_node; local += device::kWarpSize) before[local] = 0;
    __syncwarp();  // the counts are clear
    u32 counted = unit * wire::kUnitTokens, index = 0;
    count_results(line, experts, 0, counted, before);
    for (u32 u = 0; u < unit; ++u)
        index += static_cast<u32>(__popc(tokens_of_unit(u, line.tokens, line.in_sums(experts))));
    u8* const sums = op.local_region() + args.layout.sums_send(line.node);
    for (u32 left = tokens_of_unit(unit, line.tokens, line.in_sums(experts)), turn = 0; left != 0;
         left &= left - 1, ++index) {
        if (turn++ % parts != part) continue;
        const u32 token = unit * wire::kUnitTokens + static_cast<u32>(__ffs(static_cast<int>(left))) - 1;
        count_results(line, experts, counted, token, before);
        counted = token;
        sum_in_node(args, op, shape, line, experts, token, before,
                    sums + static_cast<u64>(index) * args.layout.result_bytes, rows, weights);
    }
}

// A warp of the last block, which sees the stores of all blocks: puts the sums for a rank of another node.
DEEP_EP_DEVICE void put_sums(const CombineArgs& args, Operation& op, const ForwardedNode& line) {
    const wire::LowLatencyLayout& layout = args.layout;
    const auto experts = NodeExperts::of(layout, op.rank());
    const u64 region = op.region_offset(), header = region + layout.header_send(line.source);
    u32 rows = 0;
    for (u32 unit = 0; unit * wire::kUnitTokens < line.tokens; ++unit) {
        rows += static_cast<u32>(__popc(tokens_of_unit(unit, line.tokens, line.in_sums(experts))));
    }
    if (device::lane() == 0) write_header(op, op.peers().local + header, wire::kUnpublished);
    const fabric::Piece pieces[] = {{header, region + layout.header(op.rank()), sizeof(wire::ResultHeader)},
                                    {region + layout.sums_send(line.node),
                                     region + layout.sums(layout.node_of(op.rank())), u64{rows} * layout.result_bytes}};
    op.put_signal(line.source, wire::kChunk, pieces, rows == 0 ? 1 : 2);
}

// All blocks. Returns false if the block has given up. `last` is set in the block that has put the sums.
template <class Shape>
DEEP_EP_DEVICE bool forward_sums(const CombineArgs& args, Operation& op, const Shape& shape, u32* before,
                                 const u8** rows, float* weights, bool& last) {
    const wire::LowLatencyLayout& layout = args.layout;
    if (!await_node(args, op)) return false;
    const u32 units = wire::ceil_div(layout.max_tokens, wire::kUnitTokens), nodes = layout.nodes();
    const u32 warps = gridDim.x * device::warps();
    const u32 parts = parts_of_unit(warps, nodes * units);
    for (u32 i = blockIdx.x * device::warps() + device::warp(); i < nodes * units * parts; i += warps) {
        const ForwardedNode line = forwarded_node(args, op, i / parts / units, shape.topk());
        const u32 unit = i / parts % units;
        if (unit * wire::kUnitTokens >= line.tokens) continue;
        sum_unit(args, op, shape, line, unit, i % parts, parts, before, rows, weights);
    }
    // No last look is needed for the ranks that computed these results (P12): the rows summed here are in regions,
    // which no caller overwrites.
    last = op.last_block(kStored);
    for (u32 node = device::warp(); last && node < nodes; node += device::warps()) {
        const ForwardedNode line = forwarded_node(args, op, node, shape.topk());
        if (op.present(line.source) && !op.maps(line.source)) put_sums(args, op, line);
    }
    return true;  // threads that have failed report it at the block's next barrier
}

}  // namespace deep_ep::low_latency
