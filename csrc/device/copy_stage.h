// The shared memory that a warp's bulk copies go through, for kernels that copy rows and for kernels that sum them. The
// host allocates it; kernels lay it out.
#pragma once

#include "wire/types.h"

namespace deep_ep::device {

// A stage begins with the barriers, which are followed by the pieces. Copies and sums may have the same one: their
// barriers are apart, since a barrier whose memory has been used otherwise would have to be made anew.
constexpr u32 kStagePieces = 128;  // where the pieces are; it keeps them aligned

// A ring of pieces, one being stored while the next three are loaded. With pieces of 2048 bytes, 16 warps keep 96 KB of
// loads in flight: by Little's law, a block then copies 150 GB/s from memory that responds within 0.6 us. Pieces of
// 1024 bytes fit into the 99 KB available to a block on sm_120.
struct CopyStage {
    static constexpr u32 kPieces = 4;
    static constexpr u32 kBarriers = 0;  // where they are in the stage, 8 bytes each

    // For one warp. `piece_bytes`: 0 if the target has no bulk copies.
    static constexpr u32 bytes(u32 piece_bytes) { return piece_bytes == 0 ? 0 : kStagePieces + kPieces * piece_bytes; }
};

// A ring of pieces, each from one row. 16 warps keep 80 KB of loads in flight: by Little's law, 24 SMs then read 400
// GB/s from peers whose memory responds within 4.9 us. The stages of 16 warps fit into the 99 KB available to a block
// on sm_120.
struct SumStage {
    static constexpr u32 kPieces = 5;
    static constexpr u32 kPieceBytes = 1024;
    static constexpr u32 kBarriers = kStagePieces / 2;
    static constexpr u32 kBytes = kStagePieces + kPieces * kPieceBytes;
};
static_assert(CopyStage::kBarriers + CopyStage::kPieces * sizeof(u64) <= SumStage::kBarriers &&
              SumStage::kBarriers + SumStage::kPieces * sizeof(u64) <= kStagePieces);

// Shared memory per warp of a kernel that sums rows, given what copying them takes: a target has bulk copies for both
// or for neither.
constexpr u32 sums_bytes(u32 copies_bytes) { return copies_bytes != 0 ? SumStage::kBytes : 0; }

// The same if it copies rows too, by turns.
constexpr u32 copies_and_sums_bytes(u32 copies_bytes) {
    const u32 sums = sums_bytes(copies_bytes);
    return copies_bytes > sums ? copies_bytes : sums;
}

}  // namespace deep_ep::device
