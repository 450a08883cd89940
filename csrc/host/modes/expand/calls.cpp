#include "host/modes/expand/calls.h"

#include <algorithm>

#include "host/modes/normal/tensors.h"
#include "host/session/arguments.h"
#include "kernels/expand/columns.h"
#include "kernels/expand/fold.h"

namespace deep_ep::host::expand {
namespace {

ExpertRanges ranges_of(const Layout& layout) {
    return {pointer<const i32>(layout.expert_rows), layout.experts, layout.alignment};
}

}  // namespace

void number(Runtime& runtime, Call& call, const Sizes& sizes, const Layout& layout, uint64_t topk_idx,
            uint64_t received, uint64_t counts, unsigned blocks) {
    ExpandSlotsArgs args{};
    args.shape = normal::shape_of(sizes, runtime.options().ranks);
    args.rows = layout.rows;
    args.received = pointer<const i32>(received);
    args.topk_idx = ExpertIds::at(pointer<const void>(topk_idx), sizes.id_bytes);
    args.experts = ranges_of(layout);
    args.expanded_rows = layout.expanded_rows;
    args.counts = pointer<u32>(counts);
    args.slots = pointer<i32>(layout.slots);
    args.working = choosing_warps(runtime.launcher().warps(), layout.experts);
    blocks = std::min(blocks, wire::ceil_div(kChoiceChunks, args.working));
    for (args.counted = 0; args.counted < 2; ++args.counted) {
        runtime.launch<ExpandSlotsKernel>(call, args, blocks, layout.experts);
    }
}

void copy(Runtime& runtime, Call& call, const Sizes& sizes, const Layout& layout, const Tensors& tensors,
          bool zero_padding, unsigned blocks) {
    ExpandRowsArgs args{};
    args.shape = normal::shape_of(sizes, runtime.options().ranks);
    args.rows = layout.rows;
    args.expanded_rows = layout.expanded_rows;
    args.scales = sizes.scales;
    const uint64_t bytes = uint64_t{layout.expanded_rows} * sizes.row_bytes;
    args.streaming = bytes * args.shape.ranks_ > runtime.launcher().streaming_threshold();
    args.zero_padding = zero_padding;
    args.experts = ranges_of(layout);
    args.slots = pointer<const i32>(layout.slots);
    args.x = pointer<const u8>(tensors.x);
    args.row_scales = pointer<const u32>(tensors.scales);
    args.row_weights = pointer<const float>(tensors.topk_weights);
    args.expanded_x = pointer<u8>(tensors.expanded_x);
    args.expanded_scales = pointer<u32>(tensors.expanded_scales);
    std::copy(tensors.scales_stride.begin(), tensors.scales_stride.end(), args.scales_stride);
    args.expanded_weights = pointer<float>(tensors.expanded_weights);
    runtime.launch<ExpandRowsKernel>(call, args, blocks);
}

void copy_scales(Runtime& runtime, Call& call, const Sizes& sizes, uint32_t rows, uint64_t scales, uint64_t columns,
                 uint64_t column_stride, unsigned blocks) {
    const ScaleColumnsArgs args{{},           rows, sizes.scales, pointer<const u32>(scales), pointer<u32>(columns),
                                column_stride};
    runtime.launch<ScaleColumnsKernel>(call, args, blocks);
}

void fold(Runtime& runtime, Call& call, const Sizes& sizes, const Layout& layout, const Tensors& tensors,
          unsigned blocks) {
    FoldArgs args{};
    args.shape = normal::shape_of(sizes, runtime.options().ranks);
    args.rows = layout.rows;
    args.expanded_rows = layout.expanded_rows;
    args.slots = pointer<const i32>(layout.slots);
    args.expanded_x = pointer<const u8>(tensors.expanded_x);
    args.expanded_weights = pointer<const float>(tensors.expanded_weights);
    args.bias[0] = pointer<const u8>(tensors.bias[0]);
    args.bias[1] = pointer<const u8>(tensors.bias[1]);
    args.x = pointer<u8>(tensors.x);
    args.weights = pointer<float>(tensors.topk_weights);
    runtime.launch<FoldKernel>(call, args, blocks);
}

}  // namespace deep_ep::host::expand
