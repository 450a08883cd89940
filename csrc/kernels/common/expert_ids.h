// Expert ids as the caller stores them: 32 or 64 bits each, the same on all ranks.
#pragma once

#include "device/device.h"

namespace deep_ep {

struct ExpertIds {
    u8* data;
    u32 id_bytes;

    DEEP_EP_DEVICE static ExpertIds at(const void* data, u32 id_bytes) {
        return {static_cast<u8*>(const_cast<void*>(data)), id_bytes};
    }
    DEEP_EP_DEVICE i64 get(u64 i) const {
        return id_bytes == sizeof(i64) ? reinterpret_cast<const i64*>(data)[i] : reinterpret_cast<const i32*>(data)[i];
    }
    DEEP_EP_DEVICE void set(u64 i, i64 id) const {
        if (id_bytes == sizeof(i64)) {
            reinterpret_cast<i64*>(data)[i] = id;
        } else {
            reinterpret_cast<i32*>(data)[i] = static_cast<i32>(id);
        }
    }
    DEEP_EP_DEVICE ExpertIds from(u64 i) const { return {data + i * id_bytes, id_bytes}; }
};

}  // namespace deep_ep
