// Whether the caller's layout is that of the ids that are sent. If it is not, receivers get other rows for each expert
// than their counts say, and choices of ranks that get no row of their token are lost.
#pragma once

#include "kernels/common/divider.h"
#include "kernels/common/expert_ids.h"
#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"

namespace deep_ep {

// The ids that are sent, and the layout that must have been counted from them. Device pointers.
struct CheckedIds {
    ExpertIds topk_idx;  // [tokens, topk]
    u32 topk;            // 0: nothing is checked
    Divider experts_per_rank;
    u32 experts;
    u32 tokens;
    const u8* is_token_in_rank;    // [tokens, ranks]
    const i32* tokens_per_expert;  // [experts]

    // Blocks of notify that number tokens. The last of several blocks checks meanwhile.
    DEEP_EP_DEVICE u32 numbering_blocks() const { return gridDim.x - (topk != 0 && gridDim.x > 1 ? 1 : 0); }
    DEEP_EP_DEVICE bool checked_here() const { return topk != 0 && blockIdx.x == gridDim.x - 1; }
};

// `args`: of notify, in one hop or two.
template <class Args>
DEEP_EP_DEVICE CheckedIds checked_ids(const Args& args, u32 topk) {
    return {args.topk_idx, args.checks_ids != 0 ? topk : 0, args.experts_per_rank, args.layout.experts,
            args.tokens,   args.is_token_in_rank,           args.tokens_per_expert};
}

// Shared memory of check_ids(); `block.experts` is 0 if nothing is checked.
constexpr u32 checked_ids_bytes(const BlockSizes& block) { return block.experts * static_cast<u32>(sizeof(i32)); }

// A block: counts the choices of each expert, in `counts`, [experts] in its shared memory. The operation fails if the
// layout has another count, or no row for a choice's rank. Ids that are no expert's are the business of `layout`, and
// ranks that are left out get no rows, whatever it says of them.
DEEP_EP_DEVICE void check_ids(Operation& op, const CheckedIds& ids, i32* counts) {
    using device::Scope;
    for (u32 e = threadIdx.x; e < ids.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    constexpr u32 kNone = ~0u;
    constexpr u32 kBatch = 8;  // ids, and then flags, that are loaded before the first one is used
    const u32 choices = ids.tokens * ids.topk;
    for (u32 first = threadIdx.x; first < choices; first += kBatch * blockDim.x) {
        u32 experts[kBatch];
        u8 has_row[kBatch];
#pragma unroll
        for (u32 b = 0; b < kBatch; ++b) {
            const u32 choice = first + b * blockDim.x;
            const i64 expert = choice < choices ? ids.topk_idx.get(choice) : -1;
            experts[b] = static_cast<u64>(expert) < ids.experts ? static_cast<u32>(expert) : kNone;
        }
#pragma unroll
        for (u32 b = 0; b < kBatch; ++b) {
            // Without branches, which would wait for each load: a choice of none loads the first flag.
            const u32 token = (first + b * blockDim.x) / ids.topk, expert = experts[b] == kNone ? 0 : experts[b];
            const u32 r = ids.experts_per_rank.divide(expert);
            const bool counts_it = experts[b] != kNone && op.present(r);
            if (!counts_it) experts[b] = kNone;
            has_row[b] = ids.is_token_in_rank[counts_it ? u64{token} * op.ranks() + r : 0];
        }
#pragma unroll
        for (u32 b = 0; b < kBatch; ++b) {
            if (experts[b] == kNone) continue;
            // The block's other threads add, too; the barrier below is between these additions and the reads after it.
            device::add_relaxed<Scope::kBlock>(&counts[experts[b]], 1);
            if (has_row[b] != 0) continue;
            const u32 token = (first + b * blockDim.x) / ids.topk;
            op.fail(wire::kOtherIds, Phase::kData, -1, token,
                    u64{ids.experts_per_rank.divide(experts[b])} << 32 | experts[b]);
        }
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < ids.experts; e += blockDim.x) {
        if (!op.present(ids.experts_per_rank.divide(e))) continue;
        const u64 announced = static_cast<u32>(ids.tokens_per_expert[e]), counted = static_cast<u32>(counts[e]);
        if (announced != counted) op.fail(wire::kOtherIds, Phase::kNotify, -1, e, announced << 32 | counted);
    }
}

}  // namespace deep_ep
