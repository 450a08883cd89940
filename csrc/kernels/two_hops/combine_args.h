// Arguments of the two-hop combine kernel, and the layout of a block's shared memory.
#pragma once

#include "device/copy_stage.h"
#include "kernels/common/kernel.h"
#include "kernels/common/shape.h"
#include "kernels/normal/staging.h"
#include "kernels/two_hops/dispatch_args.h"

namespace deep_ep::two_hops {

// Copied at launch. Pointers are device pointers.
struct CombineArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::TwoHopLayout layout;
    u64 arguments;  // hash of what all ranks must agree on
    u32 tokens;
    u32 rows;                   // received in dispatch, or more than that
    const u8* x;                // [rows, row_bytes]
    const float* topk_weights;  // [rows, topk], null: no weights are combined
    const RowSource* source;    // [rows]
    Plan plan;
    wire::Offer offer;        // where x and topk_weights are, if peers can see them
    u8* combined_x;           // [tokens, row_bytes]
    float* combined_weights;  // [tokens, topk]
    const u8* bias[2];        // [tokens, row_bytes] or null
};

// The rows that a rank of the node publishes; null if it sends them in local chunks.
struct Published {
    const u8* x;
    const float* weights;
};

// Per warp: some rows of one row stream at one producer, by their index among its rows of that row stream.
struct NearRows {
    const u8* x;  // address of index 0: may point outside the slot
    const float* weights;
    u32 first;  // index of the first available row
    u32 rows;
};

// Per warp: the summands of one sum.
struct Summands {
    const u8** x;
    const float** weights;
};

// The chunks of a row stream that hold rows of some tokens.
struct NeededChunks {
    u32 first;
    u32 count;
};

struct CombineShared {
    SharedArray<u8> stages;
    SharedArray<Published> published;  // of each rank of the node
    SharedArray<wire::StreamRows>
        ranges;  // [per_node, lines] where each rank of the node has the rows of this rank's lines
    SharedArray<Received> received;
    SharedArray<Stream> streams;
    SharedArray<NearRows> near;  // per warp
    SharedArray<const u8*> row_x;
    SharedArray<const float*> row_weights;
    SharedArray<NeededChunks> needed;  // of the row stream from each node, for the tokens that the block sums next
    SharedArray<u32> turns;
    SharedArray<RowRange> range;  // of the local chunk whose turn it is
    u32 bytes;

    constexpr explicit CombineShared(const BlockSizes& block, SharedCut cut = {})
        : stages(cut.take<u8>(block.warps * device::copies_and_sums_bytes(block.copies_bytes))),
          published(cut.take<Published>(block.per_node)),
          ranges(cut.take<wire::StreamRows>(block.ranks * wire::kRoles)),
          received(cut.take<Received>(block.ranks)),
          streams(cut.take<Stream>(block.ranks / block.per_node * wire::kRoles)),
          near(cut.take<NearRows>(block.warps * block.per_node)),
          row_x(cut.take<const u8*>(block.warps * summands(block.ranks, block.per_node))),
          row_weights(cut.take<const float*>(block.warps * summands(block.ranks, block.per_node))),
          needed(cut.take<NeededChunks>(block.ranks / block.per_node)),
          turns(cut.take<u32>(
              Turns::words(forwarding(block.ranks, block.per_node, wire::kRoles) + sending(block.ranks) + 1))),
          range(cut.take<RowRange>(1)),
          bytes(cut.end()) {}

    // One row from each other node, and one from each rank of this node.
    static constexpr u32 summands(u32 ranks, u32 per_node) { return ranks / per_node - 1 + per_node; }
    static constexpr u32 forwarding(u32 ranks, u32 per_node, u32 roles) {
        return roles * (ranks / per_node - 1) * wire::kSlots;
    }
    static constexpr u32 sending(u32 ranks) { return ranks * wire::kLocalSlots; }
};

// A block's tables, in shared memory.
struct CombineTables {
    Published* published;
    wire::StreamRows* ranges;
    Received* received;
    Stream* streams;
};

// A warp: sums rows, in their order, then adds the biases. Not inlined: it takes nearly all registers, and two places
// need it.
DEEP_EP_DEVICE_CALL void sum_rows(device::RowSums& sums, u8* to, const Summands& from, u32 count, const u8* bias0,
                                  const u8* bias1, u32 row_bytes) {
    sums.sum_bf16(to, from.x, count, bias0, bias1, row_bytes / static_cast<u32>(sizeof(u16)));
}

// The same on all ranks, since a rank without rows has null addresses for them.
DEEP_EP_DEVICE bool carries_weights(const CombineArgs& args) { return args.layout.rail.has_weights(); }

}  // namespace deep_ep::two_hops
