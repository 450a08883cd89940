// bfloat16 is the upper half of an fp32. NVRTC does not come with CUDA's header for it, and none is needed.
#pragma once

#include "device/anywhere.h"
#include "wire/types.h"

namespace deep_ep {

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
DEEP_EP_ANYWHERE u32 float_bits(float value) { return __float_as_uint(value); }
DEEP_EP_ANYWHERE float bits_float(u32 bits) { return __uint_as_float(bits); }
#else
DEEP_EP_ANYWHERE u32 float_bits(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}
DEEP_EP_ANYWHERE float bits_float(u32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}
#endif

DEEP_EP_ANYWHERE float bf16_to_float(u16 value) { return bits_float(static_cast<u32>(value) << 16); }

// Rounds to nearest, ties to even. Every NaN becomes 0x7fff, as with cvt.rn.bf16.f32, so that all targets give the same
// bits.
DEEP_EP_ANYWHERE u16 float_to_bf16(float value) {
    const u32 bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace deep_ep
