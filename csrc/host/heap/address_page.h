// Publishes the endpoint of a rank's network to the other ranks: through a page of its heap, which their hosts have
// mapped or have a copy of.
#pragma once

#include <cstddef>
#include <cstring>

#include "wire/heap_layout.h"

namespace deep_ep::host {

class AddressPage {
  public:
    AddressPage(wire::NetworkAddress& page, u64 generation) : page_(page), generation_(generation) {}

    void publish(const void* address, size_t bytes) {
        u64 words[kWords]{};
        std::memcpy(words, address, bytes);
        // Invalidates the page, so that a partially written address is not taken for the old one.
        __atomic_store_n(&page_.generation, 0, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        // Stored by single atomic accesses, since a late rank may still be reading the previous address.
        for (size_t i = 0; i < kWords; ++i) __atomic_store_n(word(i), words[i], __ATOMIC_RELAXED);
        // Other ranks' hosts acquire it before they read the words.
        __atomic_store_n(&page_.generation, generation_, __ATOMIC_RELEASE);
    }
    // Whether the rank has made its endpoint for this generation.
    bool is_published() const { return __atomic_load_n(&page_.generation, __ATOMIC_ACQUIRE) == generation_; }
    bool read(void* address, size_t bytes) const {
        if (!is_published()) return false;
        u64 words[kWords];
        for (size_t i = 0; i < kWords; ++i) words[i] = __atomic_load_n(word(i), __ATOMIC_RELAXED);
        std::memcpy(address, words, bytes);
        // The rank may have continued to another generation meanwhile.
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n(&page_.generation, __ATOMIC_RELAXED) == generation_;
    }

  private:
    static constexpr size_t kWords = wire::NetworkAddress::kBytes / sizeof(u64);
    static_assert(offsetof(wire::NetworkAddress, bytes) % sizeof(u64) == 0, "whole words");
    u64* word(size_t i) const { return reinterpret_cast<u64*>(page_.bytes) + i; }

    wire::NetworkAddress& page_;
    const u64 generation_;
};

}  // namespace deep_ep::host
