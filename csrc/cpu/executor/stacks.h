// Memory that fibers run on, and memory that kernels touch: mapped by hand, kept, never seen by a sanitizer's
// allocator.
#pragma once

#include <cstddef>
#include <utility>

#include "cpu/executor/config.h"

namespace deep_ep::cpu {

// Pages straight from the kernel. ThreadSanitizer treats what malloc returns as written by the thread that asked, which
// need not be ordered before the CUDA threads that use it; it knows nothing of these.
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

// One stack per fiber of a stream (or one for an agent). They are kept from launch to launch: touching a fresh page
// costs more than running a small kernel.
class Stacks {
  public:
    static constexpr size_t kBytes = (kTsan || kAsan) ? 256 << 10 : 64 << 10;
    static constexpr size_t kGuard = 4096;

    void reserve(size_t count);
    // Tells a sanitizer that nothing on these stacks lives any more.
    void forget();
    size_t count() const { return count_; }

    // The usable part of stack i.
    char* low(size_t i) const { return pages_.data() + i * kBytes + kGuard; }
    // Tops are staggered: at the same offset in their pages they would all share one set of the L1 cache.
    size_t size(size_t i) const { return kBytes - kGuard - (i % 32) * 128; }

  private:
    Pages pages_;
    size_t count_ = 0;
};

// memset and memcpy that no sanitizer intercepts.
void raw_fill(void* destination, unsigned char value, size_t bytes);
void raw_copy(void* destination, const void* source, size_t bytes);

}  // namespace deep_ep::cpu
