// The part of a heap that outputs come from: tensors that peers store into and load from.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "host/heap.h"

namespace deep_ep::host {

// What memory is filled with before anything is written, where reading what nobody wrote should show.
constexpr int kPoison = 0xA5;

// First fit at the lowest address, so that memory already touched is used again. Any thread may release: tensors die
// where they like.
class Arena {
  public:
    Arena(std::shared_ptr<Heap> heap, uint64_t offset, uint64_t bytes, bool poison);

    // Offset into the heap; nothing where no gap is large enough.
    std::optional<uint64_t> allocate(uint64_t bytes);
    void release(uint64_t offset);

    uint64_t bytes() const { return bytes_; }
    uint64_t used() const;
    uint8_t* address(uint64_t offset) const { return heap_->base() + offset; }
    // True where [address, address + bytes) lies in this arena.
    bool contains(const void* address, uint64_t bytes) const;

  private:
    const std::shared_ptr<Heap> heap_;
    const uint64_t offset_;
    const uint64_t bytes_;
    const bool poison_;
    mutable std::mutex mutex_;
    std::map<uint64_t, uint64_t> gaps_;    // offset -> bytes, no two adjacent
    std::map<uint64_t, uint64_t> blocks_;  // offset -> bytes
};

}  // namespace deep_ep::host
