// Kernels that cannot keep their state in registers: the report must say so, or its zeros would mean nothing.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/shape.h"

namespace deep_ep::test {

constexpr u32 kValues = 64;

DEEP_EP_DEVICE void spill(u32* words) {
    u32 values[kValues];
#pragma unroll
    for (u32 i = 0; i < kValues; ++i) values[i] = device::load_relaxed<device::Scope::kDevice>(words + i);
#pragma unroll
    for (u32 i = 0; i < kValues; ++i) {
        device::store_relaxed<device::Scope::kDevice>(words + i, values[kValues - 1 - i] * values[i * 7 % kValues]);
    }
}

DEEP_EP_DEVICE_CALL void spill_in_a_call(u32* words) { spill(words); }

template <class Shape>
DEEP_EP_KERNEL void __launch_bounds__(1024, 2) spilling(u32* words) {
    spill(words);
}

template <class Shape>
DEEP_EP_KERNEL void __launch_bounds__(1024, 2) spilling_in_a_call(u32* words) {
    spill_in_a_call(words);
}

}  // namespace deep_ep::test
