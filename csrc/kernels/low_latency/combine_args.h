// Arguments of a low-latency combine, and the shared memory of its blocks.
#pragma once

#include "device/copy_stage.h"
#include "kernels/common/expert_ids.h"
#include "kernels/low_latency/origins.h"
#include "kernels/low_latency/unit.h"

namespace deep_ep::low_latency {

// Copied at launch. Pointers are device pointers.
struct CombineArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::LowLatencyLayout layout;
    u64 arguments;  // hash of what all ranks must agree on
    u32 phases;
    u32 tokens;                 // on this rank
    u32 streaming;              // rows are stored bypassing the caches
    const u8* x;                // [experts of this rank, ranks * max_tokens, row_bytes] results of the experts
    ExpertIds topk_idx;         // [tokens, topk] -1: leave this choice out
    const float* topk_weights;  // [tokens, topk]; with layout.weighted those in `origins`
    u64 published;              // where x is in this rank's heap, for mapped ranks to read it there; or kUnpublished
    Origins origins;
    u8* combined_x;  // [tokens, row_bytes]
    i64* waited_ns;  // [ranks] the time spent waiting for each rank's results is added here; or null
};

// Where a rank's results are.
struct Results {
    const u8* published;  // in that rank's heap; null: results are in slots
    u32 take_part;        // the results take part in the sums
};

struct CombineShared {
    SharedArray<u8> stage;         // [warps] RowCopies of the sending half, then RowSums of the receiving one
    SharedArray<const u8*> rows;   // [warps, topk] the results of a token
    SharedArray<float> weights;    // [warps, topk]
    SharedArray<Results> results;  // [ranks]
    SharedArray<u32> kept;         // [2, warps] which warps have written rests of a put's rows
    SharedArray<u32> before;       // [warps, ranks per node] number of results of each rank of a node before a token
    u32 bytes;

    constexpr explicit CombineShared(const BlockSizes& block, SharedCut cut = {})
        : stage(cut.take<u8>(block.warps * device::copies_and_sums_bytes(block.copies_bytes))),
          rows(cut.take<const u8*>(block.warps * block.topk)),
          weights(cut.take<float>(block.warps * block.topk)),
          results(cut.take<Results>(block.ranks)),
          kept(cut.take<u32>(2 * block.warps)),
          before(cut.take<u32>(block.warps * block.per_node)),
          bytes(cut.end()) {}
};

// One thread: writes the header into the owner's region, or into the message that is put there. The owner reads it once
// it has acquired the results' signal, which follows it.
DEEP_EP_DEVICE void write_header(const Operation& op, u8* place, u64 published) {
    wire::ResultHeader header{};
    header.operation = op.number();
    header.arguments = op.arguments();
    header.published = published;
    *reinterpret_cast<wire::ResultHeader*>(place) = header;
}

}  // namespace deep_ep::low_latency
