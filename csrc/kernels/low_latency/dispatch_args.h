// Arguments of a low-latency dispatch, and the shared memory of its blocks.
#pragma once

#include "device/fp8_scales.h"
#include "kernels/common/expert_ids.h"
#include "kernels/low_latency/origins.h"
#include "kernels/low_latency/unit.h"

namespace deep_ep::low_latency {

// Copied at launch. Pointers are device pointers.
struct DispatchArgs {
    CallArgs call;
    RuntimeShape shape;  // row_bytes: of the caller's x
    wire::LowLatencyLayout layout;
    u64 arguments;  // hash of what all ranks must agree on
    u32 phases;
    u32 tokens;
    u32 streaming;  // rows are stored bypassing the caches
    Scales scales;
    Divider experts_per_rank;
    const u8* x;                // [tokens, row_bytes]
    ExpertIds topk_idx;         // [tokens, topk] expert ids, -1: none
    const float* topk_weights;  // [tokens, topk]; null if layout.weighted is 0
    i64* wrong_id;              // host-visible: an id that is neither -1 nor an expert's
    u8* recv_x;                 // [experts of this rank, ranks * max_tokens, x_bytes]
    u32* recv_scales;           // [experts of this rank, scale words, scales_stride] words of 4 bytes
    u32 scales_stride;          // distance between consecutive words of a row's scales
    i32* recv_count;            // [experts of this rank]
    Origins origins;
    i32* stats;      // [experts of this rank] the number of received rows is added here; or null
    i64* waited_ns;  // [ranks] the time spent waiting for each source is added here; or null
};

// A block's record of a source whose routing has arrived.
struct Source {
    u32 tokens;
    u32 first_result;
    u32 takes_part;  // its rows are placed here
};

// Where a row is placed.
struct RowPlace {
    u32 expert;  // of this rank
    u32 row;     // of the expert
};

struct DispatchShared {
    SharedArray<u8*> targets;      // [warps, topk] where a warp copies a row to
    SharedArray<RowPlace> places;  // [warps, topk] the same place
    SharedArray<u32> marks;        // [warps, experts of this rank] which tokens of a unit go to an expert
    SharedArray<u32> offsets;      // [warps, experts of this rank] where an expert's rows of a unit begin
    SharedArray<u32> starts;  // [ranks, experts of this rank] where an expert's rows of a source begin; while sending,
                              // [experts] the number of tokens of each
    SharedArray<u32> ends;    // [experts of this rank] where an expert's rows end, for the sources seen so far
    SharedArray<Source> sources;
    SharedArray<u32> known;  // [2] number of routings that the first warp has taken
    u32 bytes;

    constexpr explicit DispatchShared(const BlockSizes& block, SharedCut cut = {})
        : targets(cut.take<u8*>(block.warps * block.topk)),
          places(cut.take<RowPlace>(block.warps * block.topk)),
          marks(cut.take<u32>(block.warps * (block.experts / block.ranks))),
          offsets(cut.take<u32>(block.warps * (block.experts / block.ranks))),
          starts(cut.take<u32>(block.experts)),
          ends(cut.take<u32>(block.experts / block.ranks)),
          sources(cut.take<Source>(block.ranks)),
          known(cut.take<u32>(2)),
          bytes(cut.end()) {}
};

// The same as addresses; per-warp parts are those of the calling warp.
struct DispatchScratch {
    u8** targets;
    RowPlace* places;
    u32* marks;
    u32* offsets;
    u32* starts;
    u32* ends;
    Source* sources;
    u32* known;

    DEEP_EP_DEVICE DispatchScratch(const DispatchArgs& args, u32 ranks, u32 topk, u8* shared) {
        const u32 experts = args.layout.experts_per_rank, warp = device::warp();
        const DispatchShared at({ranks, experts * ranks, topk, device::warps(), 0});
        targets = at.targets.in(shared) + warp * topk;
        places = at.places.in(shared) + warp * topk;
        marks = at.marks.in(shared) + warp * experts;
        offsets = at.offsets.in(shared) + warp * experts;
        starts = at.starts.in(shared);
        ends = at.ends.in(shared);
        sources = at.sources.in(shared);
        known = at.known.in(shared);
    }
};

// The rank of a valid expert id.
DEEP_EP_DEVICE u32 rank_of(const DispatchArgs& args, u32 id) { return args.experts_per_rank.divide(id); }

}  // namespace deep_ep::low_latency
