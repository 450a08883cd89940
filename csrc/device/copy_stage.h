// The shared memory that a warp's bulk copies go through, for kernels that copy rows and for kernels that sum them. The
// host allocates it; kernels lay it out.
#pragma once

#include "wire/types.h"

namespace deep_ep::device {

// A ring of pieces, one being stored while the next three are loaded. With pieces of 2048 bytes, 16 warps keep 96 KB of
// loads in flight: by Little's law, a block then copies 150 GB/s from memory that responds within 0.6 us. Pieces of
// 1024 bytes fit into the 99 KB available to a block on sm_120.
struct CopyStage {
    static constexpr u32 kPieces = 4;
    // Before the pieces. 8 bytes a piece are used; the rest keeps the pieces aligned.
    static constexpr u32 kBarrierBytes = 128;
    static_assert(kPieces * sizeof(u64) <= kBarrierBytes);

    // For one warp. `piece_bytes`: 0 if the target has no bulk copies.
    static constexpr u32 bytes(u32 piece_bytes) { return piece_bytes == 0 ? 0 : kPieces * piece_bytes + kBarrierBytes; }
};

// A ring of pieces, each from one row. 16 warps keep 80 KB of loads in flight: by Little's law, 24 SMs then read 400
// GB/s from peers whose memory responds within 4.9 us. The stages of 16 warps fit into the 99 KB available to a block
// on sm_120.
struct SumStage {
    static constexpr u32 kPieces = 5;
    static constexpr u32 kPieceBytes = 1024;
    static constexpr u32 kBarrierBytes =
        128;  // 8 bytes per piece are used; the rest keeps the next warp's pieces aligned
    static constexpr u32 kBytes = kPieces * kPieceBytes + kBarrierBytes;
};
static_assert(SumStage::kPieces * sizeof(u64) <= SumStage::kBarrierBytes);

// Shared memory per warp of a kernel that sums rows, given what copying them takes: a target has bulk copies for both
// or for neither.
constexpr u32 sums_bytes(u32 copies_bytes) { return copies_bytes != 0 ? SumStage::kBytes : 0; }

// The same if it copies rows first: the sums then take the memory of the pieces, but not of the barriers, which would
// have to be invalidated.
constexpr u32 kSumsAfterCopies = CopyStage::kBarrierBytes;
constexpr u32 copies_and_sums_bytes(u32 copies_bytes) {
    const u32 sums = kSumsAfterCopies + SumStage::kBytes;
    return copies_bytes == 0 || copies_bytes > sums ? copies_bytes : sums;
}

}  // namespace deep_ep::device
