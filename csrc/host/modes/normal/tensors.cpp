#include "host/modes/normal/tensors.h"

#include <algorithm>

#include "host/session/arguments.h"

namespace deep_ep::host::normal {

wire::ChunkFormat dispatch_format(const Sizes& sizes, bool cached, u32 source_bytes) {
    const u32 scales_bytes = sizes.scales * static_cast<u32>(sizeof(u32));
    const u32 weights_bytes = sizes.weights ? sizes.topk * static_cast<u32>(sizeof(float)) : 0;
    return {sizes.row_bytes, scales_bytes, sizes.topk * sizes.id_bytes, weights_bytes, cached ? 0 : source_bytes};
}

wire::ChunkFormat combine_format(const Sizes& sizes) {
    return {sizes.row_bytes, 0, 0, sizes.topk * static_cast<u32>(sizeof(float)), 0};
}

RuntimeShape shape_of(const Sizes& sizes, int ranks) { return {static_cast<u32>(ranks), sizes.row_bytes, sizes.topk}; }

uint64_t hash_of_dispatch(Call& call, const Sizes& sizes, uint32_t max_rows) {
    return hash_arguments(call, {{"bytes per row of x", sizes.row_bytes},
                                 {"scales per row of x", sizes.scales},
                                 {"type of x", sizes.types},
                                 {"num_topk", sizes.topk},
                                 {"topk_weights", sizes.weights},
                                 {"bytes per id of topk_idx", sizes.id_bytes},
                                 {"num_experts", sizes.experts},
                                 {"do_expand or DEEP_EP_EXPAND", sizes.expands},
                                 {"num_worst_tokens", max_rows}});
}

ReceivedCounts received_counts(const CountTensors& tensors, u32 width) {
    return {pointer<i32>(tensors.rank_sums),
            pointer<i32>(tensors.expert_sums),
            pointer<i32>(tensors.expert_rows),
            pointer<i32>(tensors.statistics),
            width,
            tensors.alignment,
            tensors.expanded,
            tensors.starts};
}

Rows rows_of(const DispatchTensors& tensors, const Sizes& sizes, const wire::ChunkFormat& format) {
    Rows rows{};
    rows.x = pointer<const u8>(tensors.x);
    rows.scales = pointer<const u32>(tensors.scales);
    std::copy(tensors.scales_stride.begin(), tensors.scales_stride.end(), rows.scales_stride);
    const u64 stride = tensors.scales_stride[0] * sizeof(u32);
    rows.scales_in_pieces =
        tensors.scales_stride[1] == 1 && (tensors.scales | stride | format.scales_bytes) % wire::kPieceBytes == 0;
    rows.topk_idx = ExpertIds::at(pointer<const void>(tensors.topk_idx), sizes.id_bytes);
    rows.topk_weights = pointer<const float>(tensors.topk_weights);
    return rows;
}

wire::Offer offer(const Runtime& runtime, const Offered& offered, const Sizes& sizes, uint32_t rows, u32 source_bytes) {
    wire::Offer offer{};
    const auto inside = [&](uint64_t address, uint64_t bytes_per_row) {
        return address == 0 || runtime.arena()->contains(pointer<const void>(address), rows * bytes_per_row);
    };
    const bool expanded = offered.expanded_rows != 0;
    const uint64_t x_bytes = uint64_t{expanded ? offered.expanded_rows : rows} * sizes.row_bytes;
    // Nothing is stored to or loaded from an output without rows, so it may be anywhere.
    offer.visible =
        rows == 0 || ((offered.x == 0 || runtime.arena()->contains(pointer<const void>(offered.x), x_bytes)) &&
                      inside(offered.scales, sizes.scales * sizeof(u32)) &&
                      inside(offered.topk_idx, sizes.topk * (expanded ? sizeof(i32) : sizes.id_bytes)) &&
                      inside(offered.topk_weights, sizes.topk * sizeof(float)) && inside(offered.source, source_bytes));
    if (offer.visible == 0 || rows == 0) return offer;
    offer.rows = rows;
    offer.expanded_rows = offered.expanded_rows;
    offer.x = runtime.offset_of(offered.x);
    offer.scales = runtime.offset_of(offered.scales);
    offer.topk_idx = runtime.offset_of(offered.topk_idx);
    offer.topk_weights = runtime.offset_of(offered.topk_weights);
    offer.src_idx = runtime.offset_of(offered.source);
    return offer;
}

}  // namespace deep_ep::host::normal
