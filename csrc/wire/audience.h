// The ranks that are notified that a region has been given back (P4): all, or if all operations of a Buffer take two
// hops, those that may store into it.
#pragma once

#include "wire/forwarders.h"

namespace deep_ep::wire {

struct Audience {
    u32 per_node;  // ranks per node if the audience is the own node and the ranks on the same rail; otherwise 0

    // Symmetric in `rank` and `other`. `mask`: the ranks that are left out.
    constexpr bool joins(u32 rank, u32 other, const RankMask& mask) const {
        return per_node == 0 || rank / per_node == other / per_node || on_one_rail(mask, per_node, rank, other);
    }
};

static_assert(Audience{0}.joins(0, 7, {}) && Audience{4}.joins(1, 2, {}) && Audience{4}.joins(1, 5, {}) &&
                  !Audience{4}.joins(1, 6, {}) && Audience{4}.joins(1, 6, {{1 << 5 | 1 << 4}}) == false &&
                  Audience{4}.joins(1, 7, {{1 << 5 | 1 << 4}}),
              "audience");

}  // namespace deep_ep::wire
