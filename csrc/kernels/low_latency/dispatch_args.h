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

// A block looks at so many tokens of a source at once.
constexpr u32 kWindowUnits = 4, kWindowTokens = kWindowUnits * wire::kUnitTokens;
constexpr u32 kOffsets = kWindowUnits + 1;

struct DispatchShared {
    SharedArray<u8> copies;
    SharedArray<u8*> targets;      // [warps, topk] where a warp copies a row to
    SharedArray<RowPlace> places;  // [warps, topk] the same place
    // Of two windows, so that a warp may begin one while others still read the other: see Window.
    SharedArray<u32> marks;    // [2, experts of this rank, kWindowUnits]
    SharedArray<u32> here;     // [2, kWindowUnits]
    SharedArray<u32> in_node;  // [2, kWindowUnits]
    SharedArray<u16> chosen;   // [2, kWindowTokens, topk]
    SharedArray<u32> offsets;  // [experts of this rank, kOffsets] where an expert's rows of each unit of the window
                               // begin, and those of the next window
    SharedArray<u16> list;     // [kWindowTokens] the tokens of the window whose rows the block places
    SharedArray<u32> starts;   // [ranks, experts of this rank] where an expert's rows of a source begin; while sending,
                               // [experts] the number of tokens of each
    SharedArray<u32> ends;     // [experts of this rank] where an expert's rows end, for the sources seen so far
    SharedArray<Source> sources;
    SharedArray<u32> known;  // [2] number of routings that the first warp has taken
    u32 bytes;

    constexpr explicit DispatchShared(const BlockSizes& block, SharedCut cut = {})
        : copies(cut.take<u8>(block.warps * block.copies_bytes)),
          targets(cut.take<u8*>(block.warps * block.topk)),
          places(cut.take<RowPlace>(block.warps * block.topk)),
          marks(cut.take<u32>(2 * kWindowUnits * (block.experts / block.ranks))),
          here(cut.take<u32>(2 * kWindowUnits)),
          in_node(cut.take<u32>(2 * kWindowUnits)),
          chosen(cut.take<u16>(2 * kWindowTokens * block.topk)),
          offsets(cut.take<u32>(kOffsets * (block.experts / block.ranks))),
          list(cut.take<u16>(kWindowTokens)),
          starts(cut.take<u32>(block.experts)),
          ends(cut.take<u32>(block.experts / block.ranks)),
          sources(cut.take<Source>(block.ranks)),
          known(cut.take<u32>(2)),
          bytes(cut.end()) {}
};

// What a block knows of kWindowTokens tokens of a source.
struct Window {
    u32 first;     // token
    u32* marks;    // [experts of this rank, kWindowUnits] which tokens go to an expert, one bit each
    u32* here;     // [kWindowUnits] which have a row that the block places
    u32* in_node;  // [kWindowUnits] which have a row in this node
    u16* chosen;   // [kWindowTokens, topk] the expert of this rank that a choice names first, or kNoExpert
};

// The same as addresses; per-warp parts are those of the calling warp.
struct DispatchScratch {
    u8* copies;
    u8** targets;
    RowPlace* places;
    u32* offsets;
    u16* list;
    u32* starts;
    u32* ends;
    Source* sources;
    u32* known;

    DEEP_EP_DEVICE DispatchScratch(const DispatchArgs& args, u32 ranks, u32 topk, u8* shared)
        : marks_(args.layout.experts_per_rank * kWindowUnits), chosen_(kWindowTokens * topk) {
        const u32 experts = args.layout.experts_per_rank, warp = device::warp();
        const DispatchShared at({ranks, experts * ranks, topk, device::warps(), device::RowCopies::kSharedBytes});
        copies = at.copies.in(shared) + warp * device::RowCopies::kSharedBytes;
        targets = at.targets.in(shared) + warp * topk;
        places = at.places.in(shared) + warp * topk;
        window_ = {0, at.marks.in(shared), at.here.in(shared), at.in_node.in(shared), at.chosen.in(shared)};
        offsets = at.offsets.in(shared);
        list = at.list.in(shared);
        starts = at.starts.in(shared);
        ends = at.ends.in(shared);
        sources = at.sources.in(shared);
        known = at.known.in(shared);
    }
    // The block's `number`-th window, whose first token is `first`.
    DEEP_EP_DEVICE Window window(u32 number, u32 first) const {
        const u32 turn = number % 2;
        return {first, window_.marks + turn * marks_, window_.here + turn * kWindowUnits,
                window_.in_node + turn * kWindowUnits, window_.chosen + turn * chosen_};
    }

  private:
    Window window_;
    const u32 marks_, chosen_;  // entries of a window
};

// The rank of a valid expert id.
DEEP_EP_DEVICE u32 rank_of(const DispatchArgs& args, u32 id) { return args.experts_per_rank.divide(id); }

}  // namespace deep_ep::low_latency
