// The shared memory through which a warp's bulk copies go. The host allots it, kernels lay it out.
#pragma once

#include "wire/types.h"

namespace deep_ep::device {

// A row passes in pieces, one being stored while the next is loaded. By Little's law 16 warps keep 32 KB of loads and
// as much of stores on their way, more than an SM's share of the memory's rate times its latency; and 16 warps' stages
// fit into the 99 KB that a block of sm_120 gets.
struct CopyStage {
    static constexpr u32 kPieces = 2;
    static constexpr u32 kPieceBytes = 2048;
    static constexpr u32 kBarrierBytes = 128;  // 8 are used; keeps the next warp's pieces aligned
    static constexpr u32 kBytes = kPieces * kPieceBytes + kBarrierBytes;
};
static_assert(CopyStage::kPieceBytes % 16 == 0, "what a bulk copy moves");

}  // namespace deep_ep::device
