// What the calls of normal mode make of the tensors they are given, whatever way rows take.
#pragma once

#include <functional>

#include "host/modes/normal/calls.h"
#include "kernels/normal/rows.h"

namespace deep_ep::host::normal {

// Call::mode of a dispatch whose counts are exchanged.
struct Counting {
    uint32_t experts;                 // of this rank
    std::function<uint64_t()> later;  // launches what counts() is to launch; -> its serial number
};

// Which parts rows have. A cached dispatch carries rows alone. `source_bytes`: of what is told of a row's source.
wire::ChunkFormat dispatch_format(const Sizes& sizes, bool cached, u32 source_bytes);
wire::ChunkFormat combine_format(const Sizes& sizes);

RuntimeShape shape_of(const Sizes& sizes, int ranks);

// What a dispatch is given.
Rows rows_of(const DispatchTensors& tensors, const Sizes& sizes, const wire::ChunkFormat& format);

// Addresses of tensors of `rows` rows each that peers may be let at; 0: there is none.
struct Offered {
    uint64_t x, scales, topk_idx, topk_weights, source;
};
wire::Offer offer(const Runtime& runtime, const Offered& offered, const Sizes& sizes, uint32_t rows, u32 source_bytes);

}  // namespace deep_ep::host::normal
