// expand_rows: copies received rows into the expanded layout, once for each choice of a local expert. It runs after the
// dispatch kernel of the same operation; no other rank is involved.
#pragma once

#include "kernels/common/zero_row.h"
#include "kernels/expand/slots.h"

namespace deep_ep {

// Copied at launch. Pointers are device pointers.
struct ExpandRowsArgs {
    CallArgs call;
    RuntimeShape shape;
    u32 rows;           // received, or more than that
    u32 expanded_rows;  // of the expanded layout
    u32 scales;         // per row, 4 bytes each
    u32 streaming;      // rows are stored bypassing the caches
    u32 zero_padding;   // rows between those of two experts become zero
    ExpertRanges experts;
    const i32* slots;          // [rows, topk]
    const u8* x;               // [rows, row_bytes]; null: each is in the slot of its first choice already
    const u32* row_scales;     // [rows, scales]; null: rows have none
    const float* row_weights;  // [rows, topk]; null: choices have none
    u8* expanded_x;            // [expanded_rows, row_bytes]
    u32* expanded_scales;      // [expanded_rows, scales], with these strides:
    i64 scales_stride[2];
    float* expanded_weights;  // [expanded_rows]
};

struct ExpandRowsShared {
    SharedArray<u8> copies;
    SharedArray<u8*> addresses;
    SharedArray<u32> slots;
    u32 bytes;

    constexpr explicit ExpandRowsShared(const BlockSizes& block, SharedCut cut = {})
        : copies(cut.take<u8>(block.warps * block.copies_bytes)),
          addresses(cut.take<u8*>(block.warps * block.topk)),
          slots(cut.take<u32>(block.warps * block.topk)),
          bytes(cut.end()) {}
};

// A warp: lists the slots of a row in the order of its choices. A slot beyond the layout is not one of expand_slots,
// and is skipped: the memory of handles is the caller's. Returns the number of slots.
DEEP_EP_DEVICE u32 list_slots(const i32* slots, u32 topk, u32 expanded_rows, u32* list) {
    const u32 lanes_below = (1u << device::lane()) - 1;
    u32 count = 0;
    __syncwarp();  // the previous list has been read
    for (u32 base = 0; base < topk; base += device::kWarpSize) {
        const u32 k = base + device::lane();
        const u32 slot = k < topk ? device::read_once(static_cast<u32>(slots[k])) : ~0u;
        const u32 mask = __ballot_sync(device::kFullMask, slot < expanded_rows);
        if (slot < expanded_rows) list[count + __popc(mask & lanes_below)] = slot;
        count += __popc(mask);
    }
    __syncwarp();  // the list is complete
    return count;
}

// A warp: zeroes the padding after one expert's rows.
template <class Shape>
DEEP_EP_DEVICE void zero_padding(const ExpandRowsArgs& args, const Shape& shape, u32 expert) {
    const u32 rows = static_cast<u32>(args.experts.rows[expert]), begin = args.experts.begin(expert);
    for (u64 slot = u64{begin} + rows; slot < u64{begin} + args.experts.aligned(rows); ++slot) {
        if (slot >= args.expanded_rows) return;
        zero_row(args.expanded_x + slot * shape.row_bytes(), shape.row_bytes());
        for (u32 i = device::lane(); args.row_scales != nullptr && i < args.scales; i += device::kWarpSize) {
            const i64 at = static_cast<i64>(slot) * args.scales_stride[0] + i64{i} * args.scales_stride[1];
            args.expanded_scales[at] = 0;
        }
        if (args.expanded_weights != nullptr && device::lane() == 0) args.expanded_weights[slot] = 0.0f;
    }
}

// Works with any grid size.
template <class Shape>
DEEP_EP_KERNEL void expand_rows(DEEP_EP_ARGUMENT const ExpandRowsArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    const auto shape = Shape::of(args.shape);
    const u32 topk = shape.topk(), row_bytes = shape.row_bytes();
    const ExpandRowsShared at({op.ranks(), 0, topk, device::warps(), device::RowCopies::kSharedBytes});
    auto* const addresses = at.addresses.in(shared) + device::warp() * topk;
    auto* const slots = at.slots.in(shared) + device::warp() * topk;
    device::RowCopies copies(at.copies.in(shared) + device::warp() * device::RowCopies::kSharedBytes);

    const u32 warps = gridDim.x * device::warps(), warp = blockIdx.x * device::warps() + device::warp();
    for (u32 row = warp; row < args.rows; row += warps) {
        const u32 count = list_slots(args.slots + u64{row} * topk, topk, args.expanded_rows, slots);
        if (count == 0) continue;
        for (u32 i = device::lane(); i < count; i += device::kWarpSize) {
            addresses[i] = args.expanded_x + u64{slots[i]} * row_bytes;
        }
        __syncwarp();  // the addresses are complete
        if (args.x != nullptr) {
            copies.to_many(addresses, count, args.x + u64{row} * row_bytes, row_bytes, args.streaming != 0);
        } else if (count > 1) {
            copies.to_many(addresses + 1, count - 1, addresses[0], row_bytes, args.streaming != 0);
        }
        for (u32 i = 0; args.row_scales != nullptr && i < count; ++i) {
            const u32* const from = args.row_scales + u64{row} * args.scales;
            u32* const to = args.expanded_scales + i64{slots[i]} * args.scales_stride[0];
            for (u32 s = device::lane(); s < args.scales; s += device::kWarpSize) {
                to[i64{s} * args.scales_stride[1]] = from[s];
            }
        }
        for (u32 k = device::lane(); args.row_weights != nullptr && k < topk; k += device::kWarpSize) {
            const u32 slot = device::read_once(static_cast<u32>(args.slots[u64{row} * topk + k]));
            if (slot < args.expanded_rows) args.expanded_weights[slot] = args.row_weights[u64{row} * topk + k];
        }
    }
    copies.finish();
    for (u32 e = warp; args.zero_padding != 0 && e < args.experts.experts; e += warps) zero_padding(args, shape, e);
}

struct ExpandRowsKernel {
    static constexpr const char* kName = "expand_rows";
    using Args = ExpandRowsArgs;
    template <class Shape>
    static constexpr auto kEntry = expand_rows<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return ExpandRowsShared(block).bytes; }
};

}  // namespace deep_ep
