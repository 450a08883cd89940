// float8_e4m3fn, and the scales of rows in this format: one for each kScaleGroup elements. It uses integer arithmetic,
// since sm_80 has no instruction for it. All targets give the same bits.
#pragma once

#include "device/anywhere.h"
#include "device/bf16.h"

namespace deep_ep {

constexpr u32 kScaleGroup = 128;

// How the scales of an e4m3 row are chosen and stored. A row's elements times its scale give the values before the
// cast.
enum class Scales : u32 {
    kNone,      // the row is not cast
    kFloat,     // amax / 448, fp32
    kPowers,    // the smallest power of two not below that, fp32
    kExponents  // the same as UE8M0: the 8 bits of its exponent
};

// Bytes of one scale.
constexpr u32 scale_bytes(Scales scales) {
    return scales == Scales::kNone ? 0 : scales == Scales::kExponents ? sizeof(u8) : sizeof(float);
}

// Rounds to nearest, ties to even; magnitudes above 448 become 448, a NaN becomes 0x7f.
DEEP_EP_ANYWHERE u8 float_to_e4m3(float value) {
    constexpr u32 kMax = 0x43e00000, kMinNormal = 0x3c800000, kInfinity = 0x7f800000;  // 448, 2^-6
    constexpr u32 kDropped = 20, kBiases = (127 - 7) << 3;
    const u32 bits = float_bits(value), magnitude = bits & 0x7fffffffu;
    const u32 bounded = magnitude < kMax ? magnitude : kMax;
    const u32 normal = ((bounded + 0x7ffffu + (bounded >> kDropped & 1u)) >> kDropped) - kBiases;
    // The last bit of 2^14 is worth 2^-9, like that of a subnormal.
    const u32 subnormal = float_bits(bits_float(bounded) + 16384.0f) & 0xfu;
    const u32 result = bounded < kMinNormal ? subnormal : normal;
    // Targets differ in the sign of the NaNs that their arithmetic produces.
    return static_cast<u8>(magnitude > kInfinity ? 0x7fu : result | (bits >> 24 & 0x80u));
}

struct GroupScale {
    float factor;   // multiplier of the elements
    float inverse;  // the scale
};

// The scale of a group whose largest magnitude is `amax`. The formulas are those of DeepEP 1.2.1
// (`calculate_fp8_scales`), since callers compare results with it.
DEEP_EP_ANYWHERE GroupScale group_scale(float amax, Scales scales) {
    constexpr float kMax = 448.0f, kMinAmax = 1e-4f;
    amax = amax > kMinAmax ? amax : kMinAmax;
    const float inverse = amax * (1.0f / kMax);
    if (scales == Scales::kFloat) return {kMax / amax, inverse};
    const u32 bits = float_bits(inverse), exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    const u32 bounded = exponent < 254 ? exponent : 254;  // for an infinite amax
    return {bits_float((254 - bounded) << 23), bits_float(bounded << 23)};
}

// Writes the scale of a row's group into the row's scales.
DEEP_EP_ANYWHERE void store_scale(void* row_scales, u32 group, float inverse, Scales scales) {
    if (scales == Scales::kExponents) {
        static_cast<u8*>(row_scales)[group] = static_cast<u8>(float_bits(inverse) >> 23);
    } else {
        static_cast<float*>(row_scales)[group] = inverse;
    }
}

}  // namespace deep_ep
