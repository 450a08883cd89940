// The expanded layout of normal mode: a row for each choice of a local expert, contiguous per expert. These launches
// belong to a dispatch or a combine of one hop or two.
#pragma once

#include "host/modes/normal/calls.h"

namespace deep_ep::host::expand {

using normal::Sizes;

// The expanded layout of a rank; addresses of device memory.
struct Layout {
    uint64_t expert_rows = 0;  // [experts] as notify has stored them
    uint64_t slots = 0;        // [rows, topk] index of a choice's row, -1: none
    uint32_t experts = 0;      // of this rank
    uint32_t alignment = 1;
    uint32_t rows = 0;           // of the layout that is not expanded
    uint32_t expanded_rows = 0;  // of this layout
};

// Addresses of rows in both layouts; 0: not given. For their shapes see ExpandRowsArgs.
struct Tensors {
    uint64_t x = 0, scales = 0, topk_weights = 0;
    uint64_t expanded_x = 0, expanded_scales = 0, expanded_weights = 0;
    std::array<int64_t, 2> scales_stride{};  // of the expanded scales, between rows and between scales, in scales
    std::array<uint64_t, 2> bias{};          // of fold
};

// After the dispatch of `call` has been launched: finds the slots of the received `topk_idx`. `received`: address of
// the number of rows that arrived, as notify has stored it. `counts`: [kChoiceChunks, experts] of 32 bits, for the
// kernels' use. Or before the dispatch: numbers the tokens' choices of each of the experts of all ranks, with
// `received` 0 and a layout whose experts all begin at 0.
void number(Runtime& runtime, Call& call, const Sizes& sizes, const Layout& layout, uint64_t topk_idx,
            uint64_t received, uint64_t counts, unsigned blocks);
// After number(), or with the slots of an earlier dispatch: copies the rows. `zero_padding`: zero the rows between
// those of two experts.
void copy(Runtime& runtime, Call& call, const Sizes& sizes, const Layout& layout, const Tensors& tensors,
          bool zero_padding, unsigned blocks);
// After the dispatch of `call` has been launched: copies the scales of its rows, [rows, scales], to `columns`, where
// scale i of row r is at r + i * column_stride.
void copy_scales(Runtime& runtime, Call& call, const Sizes& sizes, uint32_t rows, uint64_t scales, uint64_t columns,
                 uint64_t column_stride, unsigned blocks);
// Before the combine of `call` is launched: sums each token's rows of the expanded layout. Or after it, if each
// choice's row has returned by itself: sums the rows of each token's choices and the biases, given slots for all
// choices.
void fold(Runtime& runtime, Call& call, const Sizes& sizes, const Layout& layout, const Tensors& tensors,
          unsigned blocks);

}  // namespace deep_ep::host::expand
