// layout: finds which ranks each token goes to, and how many tokens each rank, node and expert gets.
#pragma once

#include "kernels/common/divider.h"
#include "kernels/common/expert_ids.h"
#include "kernels/common/kernel.h"
#include "kernels/common/shape.h"

namespace deep_ep {

// Copied at launch. Pointers are device pointers.
struct LayoutArgs {
    RuntimeShape shape;
    Divider experts_per_rank;
    Divider ranks_per_node;
    u32 per_node;  // ranks per node
    u32 tokens;
    u32 experts;
    ExpertIds topk_idx;      // [tokens, topk] expert ids, -1: none
    i32* tokens_per_rank;    // [ranks]
    i32* tokens_per_node;    // [nodes]; null: not counted
    i32* tokens_per_expert;  // [experts]
    u8* is_token_in_rank;    // [tokens, ranks]
    i64* wrong_id;           // host-visible: an id that is neither -1 nor an expert's
    // Sums over the blocks, [ranks + nodes + experts], and the number of blocks that have added theirs. All are zero
    // between launches, which run in order (P1).
    i32* sums;
    u32* added;
};

// Counts by one block, one after another: those of ranks, nodes and experts.
struct LayoutShared {
    SharedArray<i32> counts;
    u32 bytes;

    constexpr explicit LayoutShared(const BlockSizes& block, SharedCut cut = {})
        : counts(cut.take<i32>(block.ranks + block.ranks / block.per_node + block.experts)), bytes(cut.end()) {}
};

// One thread: returns whether a token's flags already include a rank of the node.
DEEP_EP_DEVICE bool goes_to_node(const u8* in_rank, u32 node, u32 per_node) {
    u32 any = 0;
    for (u32 d = 0; d < per_node; ++d) any |= in_rank[node * per_node + d];
    return any != 0;
}

// Works with any grid size. It only counts, so the order of the additions has no effect.
template <class Shape>
DEEP_EP_KERNEL void layout(DEEP_EP_ARGUMENT const LayoutArgs args) {
    using device::Scope;
    const auto shape = Shape::of(args.shape);
    const u32 ranks = shape.ranks(), topk = shape.topk();
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    const u32 nodes = ranks / args.per_node, counted = ranks + nodes + args.experts;
    const LayoutShared at({ranks, args.experts, topk, device::warps(), 0, args.per_node});
    i32* const rank_counts = at.counts.in(shared);
    i32 *const node_counts = rank_counts + ranks, *const expert_counts = node_counts + nodes;
    for (u32 i = threadIdx.x; i < counted; i += blockDim.x) rank_counts[i] = 0;
    __syncthreads();

    for (u32 token = blockIdx.x * blockDim.x + threadIdx.x; token < args.tokens; token += gridDim.x * blockDim.x) {
        u8* in_rank = args.is_token_in_rank + static_cast<u64>(token) * ranks;
        for (u32 r = 0; r < ranks; ++r) in_rank[r] = 0;
        for (u32 k = 0; k < topk; ++k) {
            const i64 expert = args.topk_idx.get(static_cast<u64>(token) * topk + k);
            if (expert == -1) continue;
            if (static_cast<u64>(expert) >= args.experts) {
                // The host checks it before its next call. Any wrong id will do, and nothing else must be visible with
                // it: relaxed.
                device::store_relaxed<Scope::kSystem>(args.wrong_id, expert);
                continue;
            }
            const u32 r = args.experts_per_rank.divide(static_cast<u32>(expert));
            device::add_relaxed<Scope::kBlock>(&expert_counts[expert], 1);
            if (in_rank[r] != 0) continue;  // a token goes to a rank once, however many of its experts are there
            const u32 node = args.ranks_per_node.divide(r);
            if (args.tokens_per_node != nullptr && !goes_to_node(in_rank, node, args.per_node)) {
                device::add_relaxed<Scope::kBlock>(&node_counts[node], 1);
            }
            in_rank[r] = 1;
            device::add_relaxed<Scope::kBlock>(&rank_counts[r], 1);
        }
    }

    __syncthreads();
    if (gridDim.x != 1) {
        for (u32 i = threadIdx.x; i < counted; i += blockDim.x) {
            if (rank_counts[i] != 0) device::add_relaxed<Scope::kDevice>(&args.sums[i], rank_counts[i]);
        }
        __syncthreads();  // all threads' sums come before the first one's release
        // The last block acquires from the releases of the others. Litmus: count_by_atomics.
        const bool last =
            threadIdx.x == 0 && device::fetch_add_acq_rel<Scope::kDevice>(args.added, 1u) == gridDim.x - 1;
        if (!__syncthreads_or(last)) return;
        if (threadIdx.x == 0) *args.added = 0;
        for (u32 i = threadIdx.x; i < counted; i += blockDim.x) {
            rank_counts[i] = device::load_relaxed<Scope::kDevice>(&args.sums[i]);
            args.sums[i] = 0;  // for the next launch
        }
        __syncthreads();
    }
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) args.tokens_per_rank[r] = rank_counts[r];
    for (u32 node = threadIdx.x; args.tokens_per_node != nullptr && node < nodes; node += blockDim.x) {
        args.tokens_per_node[node] = node_counts[node];
    }
    for (u32 e = threadIdx.x; e < args.experts; e += blockDim.x) args.tokens_per_expert[e] = expert_counts[e];
}

struct LayoutKernel {
    static constexpr const char* kName = "layout";
    using Args = LayoutArgs;
    template <class Shape>
    static constexpr auto kEntry = layout<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return LayoutShared(block).bytes; }
};

}  // namespace deep_ep
