// The pages through which proxies find each other's endpoints.
#pragma once

#include "host/heap/address_page.h"
#include "host/network/network.h"

namespace deep_ep::host::proxy {

inline AddressPage address_page(const NetworkPlace& place, u32 rank) {
    u8* const heap = place.heaps[rank];
    return {*reinterpret_cast<wire::NetworkAddress*>(heap + place.layout.address_offset()), place.generation};
}

}  // namespace deep_ep::host::proxy
