// What a low-latency dispatch leaves for its combine.
#pragma once

#include "wire/low_latency.h"

namespace deep_ep::low_latency {

// Device pointers; written by the receiving half of the dispatch. The caller may have written into them since.
struct Origins {
    i32* tokens;        // [experts of this rank, ranks * most_tokens] the token that a row is of, at its source
    i64* ranges;        // [experts of this rank, ranks] where a source's rows begin, and in the lower half how many
    u32* positions;     // as `tokens`: wire::position
    u32* first_result;  // [ranks] where the results for a rank begin that is not mapped, at that rank
    u32* own_slots;     // [tokens, topk] wire::position of the result of each of this rank's choices, or kNoPosition
};

}  // namespace deep_ep::low_latency
