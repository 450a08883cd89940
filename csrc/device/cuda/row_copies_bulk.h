// RowCopies of device.h, by bulk copies: the first lane issues them, and no register holds a row.
#pragma once

#include "device/copy_stage.h"
#include "device/cuda/bulk.h"
#include "device/cuda/warp.h"

namespace deep_ep::device {

class RowCopies {
  public:
    static constexpr u32 kSharedBytes = CopyStage::kBytes;

    DEEP_EP_DEVICE explicit RowCopies(void* shared) : stage_(bulk::shared_address(shared)) {
        if (lane() != 0) return;
        bulk::init_barrier(barrier(), 1);
        bulk::fence_shared();  // for the barrier
        bulk::fence_global();  // the outputs that peers have offered were in use by others until now
    }

    // Orders what the first lane has acquired before its loads through the other proxy.
    DEEP_EP_DEVICE void read_what_came() {
        if (lane() == 0) bulk::fence_global();
    }

    // One load is in flight at a time, alongside the stores of the previous piece: with as many warps as a block has,
    // that is enough.
    DEEP_EP_DEVICE void to_many(u8* const* dst, u32 n, const void* src, u64 bytes, bool) {
        if (lane() != 0 || n == 0) return;
        for (u64 at = 0; at < bytes; at += CopyStage::kPieceBytes) {
            const u32 size =
                static_cast<u32>(bytes - at < CopyStage::kPieceBytes ? bytes - at : CopyStage::kPieceBytes);
            const u32 piece = stage_ + loads_ % CopyStage::kPieces * CopyStage::kPieceBytes;
            bulk::wait_read<CopyStage::kPieces - 1>();  // the piece's last stores have left it
            bulk::expect(barrier(), size);
            bulk::load(piece, static_cast<const u8*>(src) + at, size, barrier());
            bulk::wait(barrier(), loads_ & 1u);
#pragma unroll 4
            for (u32 k = 0; k < n; ++k) bulk::store(dst[k] + at, piece, size);
            bulk::commit();
            ++loads_;
        }
    }

    DEEP_EP_DEVICE void finish() {
        if (lane() == 0) bulk::wait_all();
        __syncwarp();
    }

  private:
    DEEP_EP_DEVICE u32 barrier() const { return stage_ + CopyStage::kPieces * CopyStage::kPieceBytes; }

    const u32 stage_;
    u32 loads_ = 0;  // the barrier's phase is its parity
};

}  // namespace deep_ep::device
