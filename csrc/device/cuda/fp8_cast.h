// Rows cast to e4m3, see device.h.
#pragma once

#include "device/cuda/copy.h"
#include "device/fp8_scales.h"

namespace deep_ep::device {

// A lane takes 8 elements, and half a warp takes a group.
DEEP_EP_DEVICE void warp_cast_e4m3(u8* dst, const void* src, u32 elements, Scales scales) {
    constexpr u32 kElements = detail::kPieceBytes / sizeof(u16), kLanes = kScaleGroup / kElements;
    const u32 count = elements / kElements;
    for (u32 first = 0; first < count; first += kWarpSize) {
        const u32 i = first + lane();
        const bool mine = i < count;
        detail::Piece piece{};
        if (mine) piece = detail::load_piece(src, i);
        float values[kElements], amax = 0.0f;
#pragma unroll
        for (u32 w = 0; w < kElements / 2; ++w) {
            values[2 * w] = bits_float(piece.words[w] << 16);
            values[2 * w + 1] = bits_float(piece.words[w] & 0xffff0000u);
        }
#pragma unroll
        for (u32 e = 0; e < kElements; ++e) {
            const float magnitude = bits_float(float_bits(values[e]) & 0x7fffffffu);
            amax = magnitude > amax ? magnitude : amax;  // no NaN
        }
#pragma unroll
        for (u32 step = kLanes / 2; step != 0; step /= 2) {
            const float other = __shfl_xor_sync(kFullMask, amax, static_cast<int>(step));
            amax = other > amax ? other : amax;
        }
        if (!mine) continue;
        const GroupScale scale = group_scale(amax, scales);
        u64 cast = 0;
#pragma unroll
        for (u32 e = 0; e < kElements; ++e) {
            cast |= static_cast<u64>(float_to_e4m3(values[e] * scale.factor)) << 8 * e;
        }
        reinterpret_cast<u64*>(dst)[i] = cast;
        if (i % kLanes == 0) store_scale(dst + elements, i / kLanes, scale.inverse, scales);
    }
}

}  // namespace deep_ep::device
