// Which node rows a rank sends, forwards and receives, as stored in handles: see docs/two_hops.md.
#pragma once

#include "device/device.h"
#include "wire/two_hops.h"

namespace deep_ep::two_hops {

// Written by notify, except the table and the holders, which dispatch writes. Device pointers.
struct Plan {
    i32* sent;          // [nodes] node rows that this rank sends to each node, its own included
    i32* sent_token;    // [nodes, tokens] the token of each node row
    u32* sent_ranks;    // [nodes, tokens, set words] the ranks of the node that it goes to
    i32* sent_marks;    // [nodes, marks, per_node] for every kMarkRows-th node row: rows for each rank before it
    i32* node_row;      // [tokens, nodes] index of a token's node row; -1: none
    i32* rows_to_rank;  // [ranks] rows that this rank sends to each rank
    i32*
        forwarded;  // [lines] node rows that this rank forwards in the lines up to and including each, its own included
    i32* node_rows;    // [ranks] node rows that each rank sends to this node
    i32* rank_prefix;  // [ranks] rows that this rank receives from the ranks up to and including each
    i32* table;        // [table_rows, per_node] for each forwarded node row: index among its source's rows; -1: none
    i32* holders;  // [table_rows, topk] for each of its choices: local index of the rank with that expert; -1: none.
                   // Null: a combine sums the weights of all ranks that have the row
    u32 table_rows;
    // For callers alone: node rows that this rank forwards from each node, [nodes], and where each source's rows begin
    // among those that this rank receives, [ranks]. Null: not written.
    i32* node_forwarded = nullptr;
    i32* rank_begin = nullptr;
};

constexpr u32 marks(u32 tokens) { return wire::ceil_div(tokens, wire::kMarkRows); }

// Not inlined: rare, and with loops.
DEEP_EP_DEVICE_CALL u32 substitute(const wire::RankMask& mask, u32 per_node, u32 node, u32 local) {
    return wire::forwarder_of(mask, per_node, node, local);
}
DEEP_EP_DEVICE_CALL u32 taken_over(const wire::RankMask& mask, u32 per_node, u32 rank) {
    return wire::taken_over_by(mask, per_node, rank);
}

// A rank's place in its node, the places of others, and which rank forwards for which (wire/forwarders.h).
struct Place {
    u32 node;
    u32 local;
    u32 per_node;
    u32 nodes;
    u32 second;  // local index that this rank forwards for in its second role; kNoRank: it has none
    const wire::RankMask& mask;

    DEEP_EP_DEVICE static Place of(u32 rank, const wire::TwoHopSizes& sizes, const wire::RankMask& mask) {
        const u32 per_node = sizes.per_node;
        const u32 second = sizes.roles == 1 ? wire::kNoRank : taken_over(mask, per_node, rank);
        return {rank / per_node, rank % per_node, per_node, sizes.nodes, second, mask};
    }
    DEEP_EP_DEVICE u32 near(u32 local_index) const { return node * per_node + local_index; }  // a rank of this node
    DEEP_EP_DEVICE bool has(u32 local_index) const { return !mask.has(near(local_index)); }
    // The rank that forwards this one's row stream to another node; kNoRank if no rank of that node is left.
    DEEP_EP_DEVICE u32 forwarder(u32 other_node) const { return forwarder(other_node, local); }
    // The rank of this node that forwards the row stream of `origin`.
    DEEP_EP_DEVICE u32 near_forwarder(u32 origin) const { return forwarder(node, origin % per_node); }
    // Returns whether another rank of this node forwards the row stream of `origin`, so that this one has a local row
    // stream with it.
    DEEP_EP_DEVICE bool has_local_stream(u32 origin) const {
        return !mask.has(origin) && near_forwarder(origin) != near(local);
    }
    // The role in which a rank forwards the row stream of `origin`.
    DEEP_EP_DEVICE u32 role(u32 forwarder, u32 origin) const {
        return forwarder % per_node == origin % per_node ? 0 : 1;
    }
    // The rank whose row stream a line of this rank is, or kNoRank.
    DEEP_EP_DEVICE u32 origin(u32 line) const {
        const u32 of = line < nodes ? line : line - nodes, index = line < nodes ? local : second;
        if (index == wire::kNoRank || (line >= nodes && of == node)) return wire::kNoRank;
        const u32 rank = of * per_node + index;
        return mask.has(rank) ? wire::kNoRank : rank;
    }
    // The rank of a node that forwards for the ranks with a local index.
    DEEP_EP_DEVICE u32 forwarder(u32 of_node, u32 of_local) const {
        const u32 rank = of_node * per_node + of_local;
        return mask.has(rank) ? substitute(mask, per_node, of_node, of_local) : rank;
    }
    // Number of the local row stream between this rank and the one with a local index, for rows from or to a node.
    DEEP_EP_DEVICE static u32 stream(u32 other_node, u32 local_index, u32 per_node) {
        return other_node * per_node + local_index;
    }
};

// Kind of the word for a local chunk's slot; `kind` is kStreamChunk or kStreamNext. A forwarder has row streams with
// the same number, Place::stream(), in both roles.
constexpr u32 local_word(u32 kind, u32 role, u32 chunk) {
    return kind + role * wire::kLocalSlots + chunk % wire::kLocalSlots;
}

// The node rows of this rank for one node.
struct SentRows {
    const Plan& plan;
    u32 node;
    u32 tokens;  // of this rank
    u32 per_node;

    DEEP_EP_DEVICE i32 token(u32 i) const {
        return const_cast<const volatile i32*>(plan.sent_token)[u64{node} * tokens + i];
    }
    DEEP_EP_DEVICE const u32* set(u32 i) const {
        return plan.sent_ranks + (u64{node} * tokens + i) * wire::set_words(per_node);
    }
    DEEP_EP_DEVICE bool is_for(u32 i, u32 local) const {
        return (set(i)[local / wire::kSetBits] >> local % wire::kSetBits & 1) != 0;
    }
    // Number of rows for a rank before the i-th node row, which must exist.
    DEEP_EP_DEVICE u32 rows_before(u32 i, u32 local) const {
        const u32 mark = i / wire::kMarkRows;
        u32 rows = static_cast<u32>(plan.sent_marks[(u64{node} * marks(tokens) + mark) * per_node + local]);
        for (u32 before = mark * wire::kMarkRows; before < i; ++before) rows += is_for(before, local);
        return rows;
    }
};

}  // namespace deep_ep::two_hops
