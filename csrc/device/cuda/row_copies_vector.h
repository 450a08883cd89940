// RowCopies of device.h, by 16-byte accesses, for architectures without bulk copies.
#pragma once

#include "device/cuda/copy.h"

namespace deep_ep::device {

class RowCopies {
  public:
    static constexpr u32 kSharedBytes = 0;

    DEEP_EP_DEVICE explicit RowCopies(void*) {}

    DEEP_EP_DEVICE void read_what_came() {}
    DEEP_EP_DEVICE void load(const void*, u64) {}

    DEEP_EP_DEVICE void to_many(u8* const* dst, u32 n, const void* src, u64 bytes, bool streaming) {
        warp_copy_to_many(dst, n, src, bytes, streaming);
    }

    DEEP_EP_DEVICE void finish() { __syncwarp(); }
};

}  // namespace deep_ep::device
