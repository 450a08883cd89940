// A row of zeros.
#pragma once

#include "device/device.h"

namespace deep_ep {

// A warp. `bytes`: a multiple of 8, like the address.
DEEP_EP_DEVICE_CALL void zero_row(u8* to, u64 bytes) {
    for (u64 at = device::lane() * sizeof(u64); at < bytes; at += device::kWarpSize * sizeof(u64)) {
        *reinterpret_cast<u64*>(to + at) = 0;
    }
}

}  // namespace deep_ep
