// Conversions of tensors for the calls of normal mode, common to one hop and two hops.
#pragma once

#include <functional>

#include "host/modes/normal/calls.h"
#include "kernels/normal/counts.h"
#include "kernels/normal/rows.h"

namespace deep_ep::host::normal {

// Call::mode of a dispatch whose counts are exchanged.
struct Counting {
    uint32_t experts;                  // of this rank
    std::function<void(Call&)> later;  // the launch left to counts()
};

// The parts of a row. A cached dispatch does not carry the rows' sources again. `source_bytes`: size of the description
// of a row's source.
wire::ChunkFormat dispatch_format(const Sizes& sizes, bool cached, u32 source_bytes);
wire::ChunkFormat combine_format(const Sizes& sizes);

RuntimeShape shape_of(const Sizes& sizes, int ranks);

// The arguments on which all ranks of a dispatch must agree. `max_rows`: the fixed number of rows of outputs; 0: none.
uint64_t hash_of_dispatch(Call& call, const Sizes& sizes, uint32_t max_rows);

// `width`: of rank_sums.
ReceivedCounts received_counts(const CountTensors& tensors, u32 width);

// The input rows of a dispatch.
Rows rows_of(const DispatchTensors& tensors, const Sizes& sizes, const wire::ChunkFormat& format);

// Addresses of tensors that may be offered to peers; 0: none. `offer` takes the number of their rows.
struct Offered {
    uint64_t x, scales, topk_idx, topk_weights, source;
    uint32_t expanded_rows = 0;  // of x, if it is an expanded layout and `topk_idx` takes slots
};
wire::Offer offer(const Runtime& runtime, const Offered& offered, const Sizes& sizes, uint32_t rows, u32 source_bytes);

}  // namespace deep_ep::host::normal
