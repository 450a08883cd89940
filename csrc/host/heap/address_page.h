// How a rank tells the others where its network's endpoint is: by a page of its heap, which their hosts have mapped or
// have a copy of.
#pragma once

#include <cstring>

#include "wire/heap_layout.h"

namespace deep_ep::host {

class AddressPage {
  public:
    AddressPage(wire::NetworkAddress& page, u64 generation) : page_(page), generation_(generation) {}

    void publish(const void* address, size_t bytes) {
        // Not half of the new one under the old one's number.
        __atomic_store_n(&page_.generation, 0, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        std::memcpy(page_.bytes, address, bytes);
        // Other ranks' hosts acquire it, and read the bytes only then.
        __atomic_store_n(&page_.generation, generation_, __ATOMIC_RELEASE);
    }
    // Whether the rank has made its endpoint for this generation.
    bool is_published() const { return __atomic_load_n(&page_.generation, __ATOMIC_ACQUIRE) == generation_; }
    bool read(void* address, size_t bytes) const {
        if (!is_published()) return false;
        std::memcpy(address, page_.bytes, bytes);
        // The rank may have gone on to another generation meanwhile.
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n(&page_.generation, __ATOMIC_RELAXED) == generation_;
    }

  private:
    wire::NetworkAddress& page_;
    const u64 generation_;
};

}  // namespace deep_ep::host
