// layout: which ranks each token goes to, and how many tokens each rank and expert gets.
#pragma once

#include "kernels/normal/args.h"

namespace deep_ep {

constexpr u32 layout_shared_bytes(u32 ranks, u32 experts) { return (ranks + experts) * sizeof(i32); }

// Any grid. Counts only, so the order of the additions does not show.
template <class Shape>
DEEP_EP_KERNEL void layout(const LayoutArgs args) {
    const auto shape = Shape::of(args.shape);
    const u32 ranks = shape.ranks(), topk = shape.topk();
    DEEP_EP_DYNAMIC_SHARED(i32, counts);
    i32* rank_counts = counts;
    i32* expert_counts = counts + ranks;
    for (u32 i = threadIdx.x; i < ranks + args.experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();

    for (u32 token = blockIdx.x * blockDim.x + threadIdx.x; token < args.tokens; token += gridDim.x * blockDim.x) {
        u8* in_rank = args.is_token_in_rank + static_cast<u64>(token) * ranks;
        for (u32 r = 0; r < ranks; ++r) in_rank[r] = 0;
        for (u32 k = 0; k < topk; ++k) {
            const i64 expert = args.topk_idx.get(static_cast<u64>(token) * topk + k);
            if (expert == -1) continue;
            if (static_cast<u64>(expert) >= args.experts) {
                // The host looks at it before its next call. Any of them will do, and nothing comes with it: relaxed.
                device::store_relaxed<Scope::kSystem>(args.wrong_id, expert);
                continue;
            }
            const u32 r = args.experts_per_rank.divide(static_cast<u32>(expert));
            device::add_relaxed<Scope::kBlock>(&expert_counts[expert], 1);
            if (in_rank[r] != 0) continue;  // a token goes to a rank once, however many of its experts live there
            in_rank[r] = 1;
            device::add_relaxed<Scope::kBlock>(&rank_counts[r], 1);
        }
    }

    __syncthreads();
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (rank_counts[r] != 0) device::add_relaxed<Scope::kDevice>(&args.tokens_per_rank[r], rank_counts[r]);
    }
    for (u32 e = threadIdx.x; e < args.experts; e += blockDim.x) {
        if (expert_counts[e] != 0) device::add_relaxed<Scope::kDevice>(&args.tokens_per_expert[e], expert_counts[e]);
    }
}

}  // namespace deep_ep
