// Rows cast to e4m3, see device.h.
#pragma once

#include "device/fp8_scales.h"
#include "sim/device/copy.h"

namespace deep_ep::device {

namespace detail {

// Group by group: the lanes take turns, or the first lane takes all groups, as with copies.
#if defined(DEEP_EP_COPY_PER_LANE)
inline u32 first_group() { return lane(); }
constexpr u32 kGroupStep = kWarpSize;
#else
inline u32 first_group() { return lane() == 0 ? 0 : 1u << 31; }
constexpr u32 kGroupStep = 1;
#endif

}  // namespace detail

inline void warp_cast_e4m3(u8* dst, const void* src, u32 elements, Scales scales, u32 part, u32 parts) {
    const u32 groups = elements / kScaleGroup, end = groups * (part + 1) / parts;
    for (u32 group = groups * part / parts + detail::first_group(); group < end; group += detail::kGroupStep) {
        const u16* from = static_cast<const u16*>(src) + group * kScaleGroup;
        u32 largest = 0;  // magnitudes of bfloat16 have the order of their bits, NaNs last
        for (u32 i = 0; i < kScaleGroup; ++i) {
            const u32 magnitude = from[i] & 0x7fffu;
            largest = magnitude > largest && magnitude <= 0x7f80u ? magnitude : largest;
        }
        const GroupScale scale = group_scale(bf16_to_float(static_cast<u16>(largest)), scales);
        u8* const to = dst + group * kScaleGroup;
        for (u32 i = 0; i < kScaleGroup; ++i) to[i] = float_to_e4m3(bf16_to_float(from[i]) * scale.factor);
        store_scale(dst + elements, group, scale.inverse, scales);
    }
}

}  // namespace deep_ep::device
