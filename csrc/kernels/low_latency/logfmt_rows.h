// Results that travel as LogFMT: combine casts them as it sends them, and decodes them as it sums them.
#pragma once

#include "device/logfmt.h"
#include "kernels/low_latency/unit.h"

namespace deep_ep::low_latency {

// A warp: casts a result into a slot and its rest at a mapped owner, or to where a put takes them from. Plain stores,
// ordered like those of rows that are not cast. Each lane returns whether it has written any part of the rest.
DEEP_EP_DEVICE_CALL bool cast_result(u8* place, u8* rest, const u8* x, u32 row_bytes) {
    return device::warp_cast_logfmt(place, rest, x, row_bytes / static_cast<u32>(sizeof(u16)));
}

// Each warp of the block: notes whether it has written rests of a put's rows. Plain stores, read after the block's
// barrier.
DEEP_EP_DEVICE void note_kept(u32* kept, bool keeps) {
    const bool any = __any_sync(device::kFullMask, keeps) != 0;
    if (device::lane() == 0) kept[device::warp()] = any ? 1 : 0;
}

// A warp, after that barrier: returns whether any warp has; if none has, the put leaves the rests out.
DEEP_EP_DEVICE bool any_kept(const u32* kept) {
    bool any = false;
    for (u32 warp = device::lane(); warp < device::warps(); warp += device::kWarpSize) any = any || kept[warp] != 0;
    return __any_sync(device::kFullMask, any) != 0;
}

// Where cast results have arrived. A rest is read only if its head says that there is one; it arrived together with the
// head, since the same signals release both.
DEEP_EP_DEVICE LogRows cast_results(const wire::LowLatencyLayout& layout, const u8* region) {
    return {region + layout.slot(0), region + layout.rest(0), layout.result_bytes, layout.rest_bytes};
}

// A warp: sums a token's results.
DEEP_EP_DEVICE_CALL void sum_cast_results(u8* sum, const u8* const* heads, const float* weights, u32 count,
                                          u32 row_bytes, LogRows rows) {
    device::warp_weighted_sum_logfmt(sum, heads, weights, count, row_bytes / static_cast<u32>(sizeof(u16)), rows);
}

}  // namespace deep_ep::low_latency
