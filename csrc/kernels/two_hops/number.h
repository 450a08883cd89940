// Numbers this rank's node rows: which nodes each token goes to, and which ranks there.
#pragma once

#include "kernels/common/operation.h"
#include "kernels/two_hops/plan.h"

namespace deep_ep::two_hops {

// The caller's destinations of each token.
struct Destinations {
    const u8* in_rank;  // [tokens, ranks]
    u32 tokens;
    u32 ranks;

    DEEP_EP_DEVICE bool has(u32 token, u32 rank) const {
        return token < tokens && in_rank[static_cast<u64>(token) * ranks + rank] != 0;
    }
};

// The ranks of a node that one token goes to, kSetBits at a time.
struct NodeSets {
    const Operation& op;
    const Destinations& to;
    u32 first_rank;  // of the node
    u32 per_node;

    DEEP_EP_DEVICE u32 word(u32 token, u32 index) const {
        const u32 begin = index * wire::kSetBits, end = min(per_node, begin + wire::kSetBits);
        u32 set = 0;
        for (u32 d = begin; d < end; ++d) {
            set |= u32{to.has(token, first_rank + d) && op.present(first_rank + d)} << d % wire::kSetBits;
        }
        return set;
    }
};
static_assert(device::kWarpSize <= wire::kMarkRows,
              "a warp must mark at most one of the node rows that it numbers at once");

// A warp: numbers the node rows of one node, in token order and without atomics, so that the result is the same on
// every run. `rows` is the warp's, with one word per rank of a node; each word is used by a single lane.
DEEP_EP_DEVICE void number_node_rows(const Operation& op, const Plan& plan, const wire::TwoHopLayout& layout,
                                     const Destinations& to, u32 node, u32* rows) {
    const u32 per_node = layout.per_node, words = wire::set_words(per_node), first_rank = node * per_node;
    const u32 lane = device::lane();
    const NodeSets sets{op, to, first_rank, per_node};
    for (u32 d = lane; d < per_node; d += device::kWarpSize) rows[d] = 0;
    u32 count = 0;
    for (u32 first = 0; first < to.tokens; first += device::kWarpSize) {
        const u32 token = first + lane, first_word = sets.word(token, 0);
        bool any = first_word != 0;
        for (u32 w = 1; w < words; ++w) any = sets.word(token, w) != 0 || any;
        const u32 going = __ballot_sync(device::kFullMask, any);
        const u32 i = count + __popc(going & ((1u << lane) - 1));
        if (token < to.tokens) plan.node_row[u64{token} * layout.nodes + node] = any ? static_cast<i32>(i) : -1;
        if (any) plan.sent_token[u64{node} * to.tokens + i] = static_cast<i32>(token);
        // `before_mark`: the lanes whose node rows precede the marked one.
        const u32 marked = __ballot_sync(device::kFullMask, any && i % wire::kMarkRows == 0);
        const u32 before_mark = marked - 1;
        const u64 mark = u64{node} * marks(to.tokens) + wire::ceil_div(count, wire::kMarkRows);
        for (u32 w = 0; w < words; ++w) {
            const u32 set = w == 0 ? first_word : sets.word(token, w);
            if (any) plan.sent_ranks[(u64{node} * to.tokens + i) * words + w] = set;
            for (u32 d = w * wire::kSetBits; d < min(per_node, (w + 1) * wire::kSetBits); ++d) {
                const u32 mask = __ballot_sync(device::kFullMask, set >> d % wire::kSetBits & 1);
                if (lane != d % device::kWarpSize) continue;
                if (marked != 0) {
                    plan.sent_marks[mark * per_node + d] = static_cast<i32>(rows[d] + __popc(mask & before_mark));
                }
                rows[d] += __popc(mask);
            }
        }
        count += __popc(going);
    }
    for (u32 d = lane; d < per_node; d += device::kWarpSize) {
        plan.rows_to_rank[first_rank + d] = static_cast<i32>(rows[d]);
    }
    if (lane == 0) plan.sent[node] = static_cast<i32>(count);
}

}  // namespace deep_ep::two_hops
