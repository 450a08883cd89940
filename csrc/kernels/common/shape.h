// What a kernel's speed depends on, as constants under NVRTC and as run-time values on the CPU, behind the same
// accessors.
#pragma once

#include "device/device.h"

namespace deep_ep {

// Travels in every kernel's arguments.
struct RuntimeShape {
    u32 ranks_;
    u32 row_bytes_;  // bytes of one token's x
    u32 topk_;

    DEEP_EP_DEVICE static RuntimeShape of(const RuntimeShape& given) { return given; }
    DEEP_EP_DEVICE u32 ranks() const { return ranks_; }
    DEEP_EP_DEVICE u32 row_bytes() const { return row_bytes_; }
    DEEP_EP_DEVICE u32 topk() const { return topk_; }
};

// ranks: loops over destinations unroll; row bytes: copies and sums unroll; top-k: index arithmetic without divisions.
template <u32 kRanks, u32 kRowBytes, u32 kTopk>
struct StaticShape {
    DEEP_EP_DEVICE static StaticShape of(const RuntimeShape&) { return {}; }
    DEEP_EP_DEVICE static constexpr u32 ranks() { return kRanks; }
    DEEP_EP_DEVICE static constexpr u32 row_bytes() { return kRowBytes; }
    DEEP_EP_DEVICE static constexpr u32 topk() { return kTopk; }
};

}  // namespace deep_ep
