// Stacks for fibers, and pages for other memory that kernels touch.
#pragma once

#include <cstddef>
#include <utility>

#include "sim/executor/config.h"

namespace deep_ep::cpu {

// Pages straight from the operating system: zeroed, and free until they are touched.
class Pages {
  public:
    Pages() = default;
    explicit Pages(size_t bytes);
    Pages(Pages&& other) noexcept { swap(other); }
    Pages& operator=(Pages&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Pages();

    char* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    void swap(Pages& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }
    char* data_ = nullptr;
    size_t size_ = 0;
};

// One stack per fiber of a stream (or one for an agent). Stacks are kept from launch to launch: touching fresh pages
// costs more than running a small kernel.
class Stacks {
  public:
    void reserve(size_t count);
    // Tells a sanitizer that no object on these stacks is alive.
    void forget();
    size_t count() const { return count_; }

    // The usable part of stack i.
    char* low(size_t i) const { return pages_.data() + i * stride() + guard(); }
    // Tops are staggered: at the same offset in their pages they would all share one set of the L1 cache.
    size_t size(size_t i) const { return kUsable - (i % 32) * 128; }

  private:
    // With the smallest guard, that of 4096 bytes, a power of two.
    static constexpr size_t kUsable = ((kTsan || kAsan) ? 256 << 10 : 64 << 10) - 4096;

    // Below each stack: a page, which has 64 KiB on some ARM and POWER machines.
    static size_t guard();
    static size_t stride();

    Pages pages_;
    size_t count_ = 0;
};

}  // namespace deep_ep::cpu
