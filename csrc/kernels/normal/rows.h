// The parts of a token's row, wherever it is: in the caller's tensors or in a chunk.
#pragma once

#include "kernels/common/expert_ids.h"
#include "wire/messages.h"

namespace deep_ep {

// Rows to be sent or passed on. A pointer is null if rows have no such part.
struct Rows {
    const u8* x;                // [rows, x_bytes]
    const u32* scales;          // [rows, scales], of any 4-byte type
    i64 scales_stride[2];       // between rows and between the scales of a row, in scales
    u32 scales_in_pieces;       // a row's scales are contiguous and can be copied 16 bytes at a time, at both ends
    ExpertIds topk_idx;         // [rows, topk]
    const float* topk_weights;  // [rows, topk]
};

// What rows carry is the same on all ranks, since a rank without rows of its own has null addresses for it.
DEEP_EP_DEVICE u32 scales_per_row(const wire::ChunkFormat& format) {
    return format.scales_bytes / static_cast<u32>(sizeof(u32));
}

// A warp: gathers a row's scales, whatever their layout.
DEEP_EP_DEVICE void store_scales(const Rows& rows, const wire::ChunkFormat& format, u32 row, u32* scales) {
    const u32* from = rows.scales + static_cast<i64>(row) * rows.scales_stride[0];
    if (rows.scales_in_pieces != 0) {
        device::warp_copy(scales, from, format.scales_bytes);
        return;
    }
    for (u32 i = device::lane(); i < scales_per_row(format); i += device::kWarpSize) {
        scales[i] = from[static_cast<i64>(i) * rows.scales_stride[1]];
    }
}

// A warp: localizes a row's expert ids for `destination`: the experts of other ranks become -1, with weight 0.
DEEP_EP_DEVICE void store_topk(const Rows& rows, const wire::ChunkFormat& format, u32 experts_per_rank, u32 topk,
                               u32 row, u32 destination, ExpertIds idx, float* weights) {
    const ExpertIds from_idx = rows.topk_idx.from(static_cast<u64>(row) * topk);
    const float* from_weights = rows.topk_weights + static_cast<u64>(row) * topk;
    const i64 first = static_cast<i64>(destination) * experts_per_rank;
    for (u32 k = device::lane(); k < topk; k += device::kWarpSize) {
        const i64 local = from_idx.get(k) - first;
        const bool here = static_cast<u64>(local) < experts_per_rank;
        idx.set(k, here ? local : -1);
        if (format.has_weights()) weights[k] = here ? from_weights[k] : 0.0f;
    }
}

// All blocks: clear the top-k choices of the output rows that no rank sends, those from `used` on. A dispatch may have
// no top-k, or top-k without weights.
DEEP_EP_DEVICE_CALL void blank_unused_rows(const ExpertIds& idx, float* weights, u64 used, u64 rows, u32 topk) {
    if (idx.data == nullptr) return;
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
    for (u64 i = used * topk + blockIdx.x * blockDim.x + threadIdx.x; i < rows * topk; i += step) {
        idx.set(i, -1);
        if (weights != nullptr) weights[i] = 0.0f;
    }
}

}  // namespace deep_ep
