// The calls of normal mode with two hops, in addition to those of calls.h that one and two hops share:
// docs/two_hops.md.
#pragma once

#include "host/modes/normal/calls.h"
#include "kernels/two_hops/plan.h"

namespace deep_ep::host::two_hops {

using normal::CombineTensors;
using normal::CountTensors;
using normal::DispatchTensors;
using normal::Sizes;
using TwoHopPlan = deep_ep::two_hops::Plan;

// Minimum size in bytes of a region for a dispatch or combine of these sizes.
uint64_t min_region_bytes(const Runtime& runtime, const Sizes& sizes);
// Returns the node rows per chunk of a dispatch that is not cached, and the bytes of a region that dispatch and combine
// use if there is room.
std::pair<uint32_t, uint64_t> staging(const Sizes& sizes, uint32_t ranks, uint32_t per_node, uint64_t bytes_in_flight);
// Node rows per chunk of such a dispatch in this Buffer's regions.
uint32_t chunk_rows(const Runtime& runtime, const Sizes& sizes);
// Bytes of the largest message that they need at a minimum, and of the largest one that the networks accept.
std::pair<uint64_t, uint64_t> put_bytes(const Runtime& runtime, const Sizes& sizes);
// As in calls.h.
uint32_t max_ranks(const Runtime& runtime, uint32_t experts);

// As in calls.h.
std::shared_ptr<Call> notify(Runtime& runtime, const Sizes& sizes, uint64_t is_token_in_rank,
                             uint64_t tokens_per_expert, std::optional<uint64_t> checked_ids, const TwoHopPlan& plan,
                             const CountTensors& counts, uint32_t max_rows, bool finish_later, unsigned blocks);
bool dispatch(Runtime& runtime, Call& call, const Sizes& sizes, const DispatchTensors& tensors, const TwoHopPlan& plan,
              uint32_t rows, bool cached, unsigned blocks);
bool combine(Runtime& runtime, Call& call, const Sizes& sizes, const CombineTensors& tensors, const TwoHopPlan& plan,
             uint32_t rows, bool publish, unsigned blocks);

}  // namespace deep_ep::host::two_hops
