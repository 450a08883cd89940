// The forwarder of a rank in another node passes on that rank's rows inside the node, and sums the rows that go back to
// it. It is the rank with the same local index. If that one is masked, another rank of its node takes over its role in
// addition to its own.
#pragma once

#include "wire/rank_mask.h"
#include "wire/types.h"

namespace deep_ep::wire {

constexpr u32 kNoRank = ~0u;

// The most local indices that a rank forwards for: its own, and that of one masked rank.
constexpr u32 kRoles = 2;

// The rank of `node` that forwards for the ranks of other nodes with the local index `local`. The masked ranks of a
// node are matched with its remaining ranks in order. kNoRank: too few remain; a recovery refuses such masks
// (Topology.check_mask), unless no rank of the node remains.
constexpr u32 forwarder_of(const RankMask& mask, u32 per_node, u32 node, u32 local) {
    const u32 first = node * per_node;
    if (!mask.has(first + local)) return first + local;
    u32 before = 0;
    for (u32 d = 0; d < local; ++d) before += mask.has(first + d);
    for (u32 d = 0; d < per_node; ++d) {
        if (mask.has(first + d)) continue;
        if (before == 0) return first + d;
        --before;
    }
    return kNoRank;
}

// The second local index that an unmasked rank forwards for; kNoRank: none.
constexpr u32 taken_over_by(const RankMask& mask, u32 per_node, u32 rank) {
    const u32 first = rank / per_node * per_node;
    u32 before = 0;
    for (u32 d = 0; first + d < rank; ++d) before += !mask.has(first + d);
    for (u32 d = 0; d < per_node; ++d) {
        if (!mask.has(first + d)) continue;
        if (before == 0) return d;
        --before;
    }
    return kNoRank;
}

// Whether two ranks of different nodes communicate directly in two-hop mode. The relation is symmetric.
constexpr bool on_one_rail(const RankMask& mask, u32 per_node, u32 rank, u32 other) {
    return forwarder_of(mask, per_node, other / per_node, rank % per_node) == other ||
           forwarder_of(mask, per_node, rank / per_node, other % per_node) == rank;
}

// Ranks 4 and 6 of nodes of 4 are masked: 5 and 7 forward for them.
static_assert(forwarder_of({{0x50}}, 4, 1, 0) == 5 && forwarder_of({{0x50}}, 4, 1, 2) == 7 &&
                  forwarder_of({{0x50}}, 4, 1, 1) == 5 && forwarder_of({{0xf0}}, 4, 1, 3) == kNoRank,
              "forwarders");
static_assert(taken_over_by({{0x50}}, 4, 5) == 0 && taken_over_by({{0x50}}, 4, 7) == 2 &&
                  taken_over_by({{0x10}}, 4, 6) == kNoRank && taken_over_by({}, 4, 6) == kNoRank,
              "what they take over");
static_assert(on_one_rail({{0x50}}, 4, 0, 5) && on_one_rail({{0x50}}, 4, 5, 0) && on_one_rail({{0x50}}, 4, 5, 1) &&
                  !on_one_rail({{0x50}}, 4, 0, 7) && !on_one_rail({{0x50}}, 4, 2, 5),
              "rails");

}  // namespace deep_ep::wire
