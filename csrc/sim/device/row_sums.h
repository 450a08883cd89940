// RowSums of device.h.
#pragma once

#include "sim/device/copy.h"

namespace deep_ep::device {

class RowSums {
  public:
    static constexpr u32 kSharedBytes = 0;

    explicit RowSums(void*) {}

    void sum_bf16(void* dst, const u8* const* src, u32 n, const void* bias0, const void* bias1, u64 elements) {
        warp_sum_bf16(dst, src, n, bias0, bias1, elements);
    }
    void weighted_sum_bf16(void* dst, const u8* const* src, const float* weights, u32 n, u64 elements) {
        warp_weighted_sum_bf16(dst, src, weights, n, elements);
    }
};

}  // namespace deep_ep::device
