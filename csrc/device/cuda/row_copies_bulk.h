// RowCopies of device.h, by bulk copies: the first lane issues them, and no register holds a row.
#pragma once

#include "device/copy_stage.h"
#include "device/cuda/bulk.h"
#include "device/cuda/warp.h"

namespace deep_ep::device {

// Pieces of rows pass through a ring in shared memory in the order in which they are copied. While one piece is stored,
// the next kAhead ones are loaded, those of the row that follows among them.
class RowCopies {
  public:
    static constexpr u32 kSharedBytes = CopyStage::bytes(DEEP_EP_COPY_PIECE);

    DEEP_EP_DEVICE explicit RowCopies(void* shared)
        : barriers_(bulk::shared_address(shared) + CopyStage::kBarriers),
          stage_(bulk::shared_address(shared) + kStagePieces) {
        if (lane() != 0) return;
        for (u32 slot = 0; slot < CopyStage::kPieces; ++slot) bulk::init_barrier(barrier(slot), 1);
        bulk::fence_shared();  // for the barriers
        bulk::fence_global();  // the outputs that peers have offered were in use by others until now
    }

    // Orders what the first lane has acquired before its loads through the other proxy, and what the warp has read from
    // the stage.
    DEEP_EP_DEVICE void read_what_came() {
        if (lane() != 0) return;
        bulk::fence_global();
        bulk::fence_shared();
    }

    DEEP_EP_DEVICE void load(const void* src, u64 bytes) {
        if (lane() != 0) return;
        const u32 size = static_cast<u32>(bytes);
        if (row_.issued == 0) {
            row_.src = static_cast<const u8*>(src);
            issue(row_, size);
        } else {
            next_ = {static_cast<const u8*>(src), 0};
            issue(next_, size);
        }
    }

    DEEP_EP_DEVICE void to_many(u8* const* dst, u32 n, const void* src, u64 bytes, bool) {
        if (lane() != 0) return;
        const u32 size = static_cast<u32>(bytes);
        if (row_.issued == 0) {
            if (n == 0) return;
            row_.src = static_cast<const u8*>(src);
            issue(row_, size);
        }
        for (u32 at = 0; at < size; at += kPieceBytes) {
            const u32 slot = stored_ % CopyStage::kPieces, piece = stage_ + slot * kPieceBytes;
            bulk::wait(barrier(slot), stored_ / CopyStage::kPieces & 1u);
#pragma unroll 4
            for (u32 k = 0; k < n; ++k) bulk::store(dst[k] + at, piece, piece_bytes(at, size));
            bulk::commit();
            ++stored_;
            bulk::wait_read<kStored>();  // the slot of the next load has been read
            if (row_.issued < size) {
                issue(row_, size);
            } else {
                issue(next_, size);
            }
        }
        row_ = next_;
        next_ = {};
    }

    DEEP_EP_DEVICE void finish() {
        if (lane() == 0) {
            // No load may still be writing to the ring when the block ends, even of a row that is not copied after all.
            for (; stored_ != loaded_; ++stored_) {
                bulk::wait(barrier(stored_ % CopyStage::kPieces), stored_ / CopyStage::kPieces & 1u);
            }
            row_ = next_ = {};
            bulk::wait_all();
        }
        __syncwarp();
    }

  private:
    static constexpr u32 kPieceBytes = DEEP_EP_COPY_PIECE;
    static_assert(kPieceBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
    static constexpr u32 kStored = 1;  // pieces that may be on their way from the ring
    static constexpr u32 kAhead = CopyStage::kPieces - kStored;

    // A row whose pieces are loaded.
    struct Row {
        const u8* src = nullptr;
        u32 issued = 0;  // bytes whose loads have been issued
    };

    // Loads as much of a row of `size` bytes as the ring has room for; nothing if there is no row.
    DEEP_EP_DEVICE void issue(Row& row, u32 size) {
        while (row.src != nullptr && row.issued < size && loaded_ - stored_ < kAhead) {
            const u32 slot = loaded_ % CopyStage::kPieces, bytes = piece_bytes(row.issued, size);
            bulk::expect(barrier(slot), bytes);
            bulk::load(stage_ + slot * kPieceBytes, row.src + row.issued, bytes, barrier(slot));
            row.issued += bytes;
            ++loaded_;
        }
    }
    static DEEP_EP_DEVICE u32 piece_bytes(u32 at, u32 size) {
        return size - at < kPieceBytes ? size - at : kPieceBytes;
    }
    DEEP_EP_DEVICE u32 barrier(u32 slot) const { return barriers_ + slot * static_cast<u32>(sizeof(u64)); }

    const u32 barriers_, stage_;
    u32 loaded_ = 0, stored_ = 0;  // pieces so far; the parity of a barrier's phase is that of its slot's earlier uses
    Row row_, next_;               // the row that to_many() copies next, and the one after it
};

}  // namespace deep_ep::device
