// The shared memory through which a warp's bulk copies go. The host allots it, kernels lay it out: of a kernel that
// copies rows, and of one that sums them.
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

// A ring of pieces, each of one row. 16 warps keep 80 KB of loads on their way: by Little's law 24 SMs then take
// 400 GB/s from peers whose memory answers within 4.9 us. Their stages fit into the 99 KB that a block of sm_120 gets.
struct SumStage {
    static constexpr u32 kPieces = 5;
    static constexpr u32 kPieceBytes = 1024;
    static constexpr u32 kBarrierBytes = 128;  // 8 for each piece are used; keeps the next warp's pieces aligned
    static constexpr u32 kBytes = kPieces * kPieceBytes + kBarrierBytes;
};
static_assert(SumStage::kPieces * sizeof(u64) <= SumStage::kBarrierBytes);

// Of a kernel that sums rows, by what it would take to copy them: targets have bulk copies for both or for none.
constexpr u32 sums_bytes(u32 copies_bytes) { return copies_bytes != 0 ? SumStage::kBytes : 0; }

}  // namespace deep_ep::device
