// RowCopies of device.h. With DEEP_EP_COPY_PER_LANE a copy is made as late as the contract allows: by the next call, or
// by finish(). This exposes a kernel that signals before finish(), or that overwrites a source too early. A row that is
// loaded ahead is read at once, which exposes one that has not arrived yet.
#pragma once

#include "sim/device/copy.h"
#include "wire/heap_layout.h"

namespace deep_ep::device {

class RowCopies {
  public:
    static constexpr u32 kSharedBytes = 0;

    explicit RowCopies(void*) {}

    void read_what_came() {}

#if defined(DEEP_EP_COPY_PER_LANE)

    void load(const void* src, u64, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        (void)*static_cast<const volatile u64*>(src);
        if (next_ != nullptr) cpu::refuse("RowCopies: a third row is loaded ahead", {file, line});
        (row_ == nullptr ? row_ : next_) = src;
    }

    void to_many(u8* const* dst, u32 n, const void* src, u64 bytes, bool, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
        if (row_ != nullptr && row_ != src) {
            cpu::refuse("RowCopies: another row is copied than the one loaded ahead", {file, line});
        }
        row_ = next_;
        next_ = nullptr;
        make();
        for (u32 k = 0; k < n; ++k) targets_[k] = dst[k];
        count_ = n;
        source_ = static_cast<const Piece*>(src);
        pieces_ = bytes / kPieceBytes;
    }

    void finish() {
        make();
        row_ = next_ = nullptr;
        __syncwarp();
    }

  private:
    void make() {
        for (u64 i = lane(); i < pieces_; i += kWarpSize) {
            const Piece piece = source_[i];
            for (u32 k = 0; k < count_; ++k) reinterpret_cast<Piece*>(targets_[k])[i] = piece;
        }
        pieces_ = 0;
    }

    u8* targets_[wire::kMaxRanks];
    u32 count_ = 0;
    const Piece* source_ = nullptr;
    u64 pieces_ = 0;
    const void *row_ = nullptr, *next_ = nullptr;  // loaded ahead

#else

    void load(const void*, u64) {}

    void to_many(u8* const* dst, u32 n, const void* src, u64 bytes, bool streaming) {
        if (lane() == 0) cpu::copy_to_many(dst, n, src, bytes, streaming);
    }

    void finish() { __syncwarp(); }

#endif
};

}  // namespace deep_ep::device
