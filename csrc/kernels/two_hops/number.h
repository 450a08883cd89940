// Numbers this rank's node rows: for which nodes each token is, and for which ranks there.
#pragma once

#include "kernels/common/operation.h"
#include "kernels/two_hops/plan.h"

namespace deep_ep::two_hops {

// Where a token goes, as the caller says it.
struct Destinations {
    const u8* in_rank;  // [tokens, ranks]
    u32 tokens;
    u32 ranks;

    DEEP_EP_DEVICE bool has(u32 token, u32 rank) const {
        return token < tokens && in_rank[static_cast<u64>(token) * ranks + rank] != 0;
    }
};

// A warp: one node's. In token order and without atomics, so that the result is the same on every run. `rows`: the
// warp's, a word for each rank of a node.
DEEP_EP_DEVICE void number_node_rows(const Operation& op, const Plan& plan, const wire::TwoHopLayout& layout,
                                     const Destinations& to, u32 node, u32* rows) {
    const u32 per_node = layout.per_node, words = wire::set_words(per_node), first_rank = node * per_node;
    const u32 lanes_below = (1u << device::lane()) - 1;
    for (u32 d = device::lane(); d < per_node; d += device::kWarpSize) rows[d] = 0;
    __syncwarp();
    u32 count = 0;
    for (u32 first = 0; first < to.tokens; first += device::kWarpSize) {
        const u32 token = first + device::lane();
        bool any = false;
        for (u32 d = 0; d < per_node; ++d) any = (to.has(token, first_rank + d) && op.present(first_rank + d)) || any;
        const u32 going = __ballot_sync(device::kFullMask, any);
        const u32 i = count + __popc(going & lanes_below);
        if (token < to.tokens) plan.node_row[u64{token} * layout.nodes + node] = any ? static_cast<i32>(i) : -1;
        if (any) plan.sent_token[u64{node} * to.tokens + i] = static_cast<i32>(token);
        const bool marked = any && i % wire::kMarkRows == 0;
        const u64 mark = u64{node} * marks(to.tokens) + i / wire::kMarkRows;
        u32 set = 0;
        for (u32 d = 0; d < per_node; ++d) {
            const bool goes = to.has(token, first_rank + d) && op.present(first_rank + d);
            const u32 mask = __ballot_sync(device::kFullMask, goes);
            const u32 before = rows[d];
            if (marked) plan.sent_marks[mark * per_node + d] = static_cast<i32>(before + __popc(mask & lanes_below));
            __syncwarp();  // all lanes have read the count
            if (device::lane() == 0) rows[d] = before + __popc(mask);
            set |= u32{goes} << d % wire::kSetBits;
            const bool word_ends = d % wire::kSetBits == wire::kSetBits - 1 || d + 1 == per_node;
            if (!word_ends) continue;
            if (any) plan.sent_ranks[(u64{node} * to.tokens + i) * words + d / wire::kSetBits] = set;
            set = 0;
        }
        __syncwarp();  // the counts are complete
        count += __popc(going);
    }
    for (u32 d = device::lane(); d < per_node; d += device::kWarpSize) {
        plan.rows_to_rank[first_rank + d] = static_cast<i32>(rows[d]);
    }
    if (device::lane() == 0) plan.sent[node] = static_cast<i32>(count);
}

}  // namespace deep_ep::two_hops
