// RowSums of device.h, by bulk copies into shared memory: data in flight takes no registers, and its amount does not
// depend on how many rows are summed.
#pragma once

#include "device/copy_stage.h"
#include "device/cuda/bulk.h"
#include "device/cuda/copy.h"
#include "device/cuda/warp.h"

namespace deep_ep::device {

class RowSums {
  public:
    static constexpr u32 kSharedBytes = SumStage::kBytes;

    DEEP_EP_DEVICE explicit RowSums(void* shared)
        : barriers_(bulk::shared_address(shared) + SumStage::kBarriers),
          stage_(bulk::shared_address(shared) + kStagePieces) {
        if (lane() == 0) {
            for (u32 slot = 0; slot < SumStage::kPieces; ++slot) bulk::init_barrier(barrier(slot), 1);
        }
        __syncwarp();  // all lanes wait at these barriers
    }

    DEEP_EP_DEVICE void sum_bf16(void* dst, const u8* const* src, u32 n, const void* bias0, const void* bias1,
                                 u64 elements) {
        sum(
            dst, src, n, elements, [](auto& sum, const auto& piece, u32) { sum.add(piece); },
            [&](auto& sum, u32 i) {
                if (bias0 != nullptr) sum.add(detail::load_piece(bias0, i));
                if (bias1 != nullptr) sum.add(detail::load_piece(bias1, i));
            });
    }
    DEEP_EP_DEVICE void weighted_sum_bf16(void* dst, const u8* const* src, const float* weights, u32 n, u64 elements) {
        sum(
            dst, src, n, elements, [&](auto& sum, const auto& piece, u32 k) { sum.add(piece, weights[k]); },
            [](auto&, u32) {});
    }

  private:
    static constexpr u32 kParts =
        SumStage::kPieceBytes / (kWarpSize * detail::kPieceBytes);  // parts of a piece per lane
    static_assert(kParts * kWarpSize * detail::kPieceBytes == SumStage::kPieceBytes);

    // A step has one piece of each row. Pieces arrive in the order in which they are summed, through a ring that is
    // always full except at the end of the rows. add(sum, piece, k) adds a piece of the k-th row, and last(sum, i) what
    // follows the rows.
    template <class Add, class Last>
    DEEP_EP_DEVICE void sum(void* dst, const u8* const* src, u32 n, u64 elements, Add add, Last last) {
        const u32 bytes = static_cast<u32>(elements * sizeof(u16)), count = bytes / detail::kPieceBytes;
        Next next{src, n, bytes, 0, 0};
        const u32 all = (bytes + SumStage::kPieceBytes - 1) / SumStage::kPieceBytes * n;
        u32 slot = slot_;
        // Orders the loads below, which go through the other proxy, after three things: the initialization of the
        // barriers, and the reads of the stage for the previous rows, after which the warp has met; and the owners'
        // stores to the rows, which they released at system scope in a release that this lane has acquired.
        if (lane() == 0) {
            bulk::fence_shared();
            bulk::fence_global();
        }
        for (u32 i = 0; i < all && i < SumStage::kPieces; ++i) {
            if (lane() == 0) load(slot, next);
            next.advance();
            slot = after(slot);
        }
        u32 left = all < SumStage::kPieces ? 0 : all - SumStage::kPieces;
        for (u32 first = lane(), begin = 0; begin < count; begin += kParts * kWarpSize, first += kParts * kWarpSize) {
            detail::PieceSum sums[kParts]{};
#pragma unroll 1
            for (u32 k = 0; k < n; ++k) {
                bulk::wait(barrier(slot_), parity_);
                const u32 here = stage_ + slot_ * SumStage::kPieceBytes + lane() * detail::kPieceBytes;
#pragma unroll
                for (u32 part = 0; part < kParts; ++part) {
                    if (first + part * kWarpSize >= count) continue;
                    detail::Piece piece;
                    bulk::read(here + part * kWarpSize * detail::kPieceBytes, piece.words);
                    add(sums[part], piece, k);
                }
                __syncwarp();  // the piece has been read
                if (left != 0) {
                    if (lane() == 0) {
                        bulk::fence_shared();  // the piece just read is overwritten through the other proxy
                        load(slot_, next);
                    }
                    next.advance();
                    --left;
                }
                slot_ = after(slot_);
                if (slot_ == 0) parity_ ^= 1u;
            }
#pragma unroll
            for (u32 part = 0; part < kParts; ++part) {
                const u32 i = first + part * kWarpSize;
                if (i >= count) continue;
                last(sums[part], i);
                detail::store_piece(dst, i, sums[part].rounded());
            }
        }
    }

    // The next piece to load.
    struct Next {
        const u8* const* src;
        const u32 n, bytes;
        u32 source, at;

        DEEP_EP_DEVICE void advance() {
            if (++source != n) return;
            source = 0;
            at += SumStage::kPieceBytes;
        }
    };

    static DEEP_EP_DEVICE u32 after(u32 slot) { return slot + 1 == SumStage::kPieces ? 0 : slot + 1; }
    DEEP_EP_DEVICE u32 barrier(u32 slot) const { return barriers_ + slot * static_cast<u32>(sizeof(u64)); }
    DEEP_EP_DEVICE void load(u32 slot, const Next& next) const {
        const u32 left = next.bytes - next.at, size = left < SumStage::kPieceBytes ? left : SumStage::kPieceBytes;
        bulk::expect(barrier(slot), size);
        bulk::load(stage_ + slot * SumStage::kPieceBytes, next.src[next.source] + next.at, size, barrier(slot));
    }

    const u32 barriers_, stage_;
    u32 slot_ = 0;    // slot of the piece that is summed next
    u32 parity_ = 0;  // parity of its barrier's phase
};

}  // namespace deep_ep::device
