// fold: the reverse of expand_rows: sums the rows that a token has in the expanded layout. It runs before the combine
// kernel of the same operation, or, if each choice's row has returned by itself, after it, on the rank that owns the
// token. No other rank is involved.
//
// The order of summation is that of the token's choices: (0 + first) + second ..., in fp32, rounded once. Biases come
// before the choices.
#pragma once

#include "device/copy_stage.h"
#include "kernels/expand/rows.h"

namespace deep_ep {

// Copied at launch. Pointers are device pointers.
struct FoldArgs {
    CallArgs call;
    RuntimeShape shape;  // its top-k is that of the dispatch
    u32 rows;            // received in the dispatch, or more than that
    u32 expanded_rows;
    const i32* slots;               // [rows, topk]
    const u8* expanded_x;           // [expanded_rows, row_bytes] of bf16
    const float* expanded_weights;  // [expanded_rows]; null: choices have none
    const u8* bias[2];              // [rows, row_bytes] or null
    u8* x;                          // [rows, row_bytes]
    float* weights;                 // [rows, topk]
};

struct FoldShared {
    SharedArray<u8> sums;
    SharedArray<const u8*> addresses;
    SharedArray<u32> slots;
    u32 bytes;

    constexpr explicit FoldShared(const BlockSizes& block, SharedCut cut = {})
        : sums(cut.take<u8>(block.warps * device::sums_bytes(block.copies_bytes))),
          addresses(cut.take<const u8*>(block.warps * summands(block.topk))),
          slots(cut.take<u32>(block.warps * block.topk)),
          bytes(cut.end()) {}

    static constexpr u32 summands(u32 topk) { return 2 + topk; }  // biases and rows
};

// Works with any grid size.
template <class Shape>
DEEP_EP_KERNEL void fold(DEEP_EP_ARGUMENT const FoldArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    const auto shape = Shape::of(args.shape);
    const u32 topk = shape.topk(), row_bytes = shape.row_bytes();
    const FoldShared at({op.ranks(), 0, topk, device::warps(), device::RowCopies::kSharedBytes});
    auto* const addresses = at.addresses.in(shared) + device::warp() * FoldShared::summands(topk);
    auto* const slots = at.slots.in(shared) + device::warp() * topk;
    device::RowSums sums(at.sums.in(shared) + device::warp() * device::RowSums::kSharedBytes);

    const u32 warps = gridDim.x * device::warps();
    for (u32 row = blockIdx.x * device::warps() + device::warp(); row < args.rows; row += warps) {
        const u32 count = list_slots(args.slots + u64{row} * topk, topk, args.expanded_rows, slots);
        if (count == 0) continue;  // a row beyond those that arrived
        u32 biases = 0;
        for (const u8* const bias : args.bias) {
            if (bias == nullptr) continue;
            if (device::lane() == 0) addresses[biases] = bias + u64{row} * row_bytes;
            ++biases;
        }
        for (u32 i = device::lane(); i < count; i += device::kWarpSize) {
            addresses[biases + i] = args.expanded_x + u64{slots[i]} * row_bytes;
        }
        __syncwarp();  // the addresses are complete
        sums.sum_bf16(args.x + u64{row} * row_bytes, addresses, biases + count, nullptr, nullptr,
                      row_bytes / static_cast<u32>(sizeof(u16)));
        for (u32 k = device::lane(); args.expanded_weights != nullptr && k < topk; k += device::kWarpSize) {
            const u32 slot = device::read_once(static_cast<u32>(args.slots[u64{row} * topk + k]));
            args.weights[u64{row} * topk + k] = slot < args.expanded_rows ? args.expanded_weights[slot] : 0.0f;
        }
    }
}

struct FoldKernel {
    static constexpr const char* kName = "fold";
    using Args = FoldArgs;
    template <class Shape>
    static constexpr auto kEntry = fold<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return FoldShared(block).bytes; }
};

}  // namespace deep_ep
