// Rows cast to e4m3, see device.h.
#pragma once

#include "device/cuda/copy.h"
#include "device/fp8_scales.h"

namespace deep_ep::device {

namespace detail {

// Two values as e4m3, as float_to_e4m3 rounds them; the first one becomes the lower byte.
DEEP_EP_DEVICE u32 pair_to_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return static_cast<u32>(float_to_e4m3(high)) << 8 | float_to_e4m3(low);
#endif
}

// Half a warp casts a group; each lane casts its 8 elements. All lanes call it; `mine`: the lane has a piece.
DEEP_EP_DEVICE void cast_piece(u8* dst, const Piece& piece, u32 i, bool mine, u32 elements, Scales scales) {
    constexpr u32 kElements = kPieceBytes / sizeof(u16), kLanes = kScaleGroup / kElements;
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
    if (!mine) return;
    const GroupScale scale = group_scale(amax, scales);
    u32 cast[kElements / 4];
#pragma unroll
    for (u32 w = 0; w < kElements / 4; ++w) {
        const float* const four = values + 4 * w;
        cast[w] = pair_to_e4m3(four[0] * scale.factor, four[1] * scale.factor) |
                  pair_to_e4m3(four[2] * scale.factor, four[3] * scale.factor) << 16;
    }
    reinterpret_cast<u64*>(dst)[i] = static_cast<u64>(cast[1]) << 32 | cast[0];
    if (i % kLanes == 0) store_scale(dst + elements, i / kLanes, scale.inverse, scales);
}

}  // namespace detail

// A batch of pieces is loaded before the first one is cast: a lane that waited for each would spend a row in waiting.
DEEP_EP_DEVICE void warp_cast_e4m3(u8* dst, const void* src, u32 elements, Scales scales, u32 part, u32 parts) {
    constexpr u32 kCast = 2 * detail::kBatch, kPieces = kScaleGroup * sizeof(u16) / detail::kPieceBytes;  // of a group
    const u32 groups = elements / kScaleGroup, end = groups * (part + 1) / parts * kPieces;
    for (u32 begin = groups * part / parts * kPieces; begin < end; begin += kCast * kWarpSize) {
        detail::Piece pieces[kCast]{};
        const u32 first = begin + lane();
#pragma unroll
        for (u32 b = 0; b < kCast; ++b) {
            if (first + b * kWarpSize < end) pieces[b] = detail::load_piece(src, first + b * kWarpSize);
        }
#pragma unroll
        for (u32 b = 0; b < kCast; ++b) {
            if (begin + b * kWarpSize >= end) break;
            const u32 i = first + b * kWarpSize;
            detail::cast_piece(dst, pieces[b], i, i < end, elements, scales);
        }
    }
}

}  // namespace deep_ep::device
