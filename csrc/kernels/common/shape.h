// The parameters that a kernel's speed depends on: constants under NVRTC and run-time values on the CPU, behind the
// same accessors.
#pragma once

#include "device/device.h"

namespace deep_ep {

// Part of every kernel's arguments.
struct RuntimeShape {
    u32 ranks_;
    u32 row_bytes_;  // bytes of one token's x
    u32 topk_;

    static constexpr u32 kMostTopk = 32;  // the bound of `topk_`
    DEEP_EP_DEVICE static RuntimeShape of(const RuntimeShape& given) { return given; }
    DEEP_EP_DEVICE u32 ranks() const { return ranks_; }
    DEEP_EP_DEVICE u32 row_bytes() const { return row_bytes_; }
    DEEP_EP_DEVICE u32 topk() const { return topk_; }
};

// A constant number of ranks unrolls loops over destinations; constant row bytes unroll copies and sums; a constant
// top-k makes index arithmetic free of divisions.
template <u32 kRanks, u32 kRowBytes, u32 kTopk>
struct StaticShape {
    static constexpr u32 kMostTopk = kTopk == 0 ? 1 : kTopk;
    DEEP_EP_DEVICE static StaticShape of(const RuntimeShape&) { return {}; }
    DEEP_EP_DEVICE static constexpr u32 ranks() { return kRanks; }
    DEEP_EP_DEVICE static constexpr u32 row_bytes() { return kRowBytes; }
    DEEP_EP_DEVICE static constexpr u32 topk() { return kTopk; }
};

}  // namespace deep_ep
