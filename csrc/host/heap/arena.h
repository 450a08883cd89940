// The part of a heap that outputs come from: tensors that peers store into and load from.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "host/heap/heap.h"

namespace deep_ep::host {

// What memory is filled with before anything is written, where a read of what was never written should show.
constexpr int kPoison = 0xA5;

// First fit at the lowest address, so that memory already touched is used again. Any thread may release: tensors die
// where they like.
//
// Where the heap grows, so does the arena: from what is there when the Buffer is made up to `most` bytes. Peers can
// only use what they have mapped, which is what has been shared with them; what is there beyond waits for that (P10).
class Arena {
  public:
    Arena(std::shared_ptr<Heap> heap, uint64_t offset, uint64_t most, bool poison);

    // Offset into the heap, of memory that all peers have mapped; nothing where no gap is large enough.
    std::optional<uint64_t> allocate(uint64_t bytes);
    // The same, but also of memory that peers have not mapped yet; where there is none, the heap grows. Throws what the
    // driver says if that fails.
    std::optional<uint64_t> allocate_ahead(uint64_t bytes);
    void release(uint64_t offset);

    // All peers map so much of the heap, before they launch what this rank's next offer is for.
    void share(uint64_t heap_bytes);
    // It is no longer known which peers have mapped what has been added: until shared again it counts as not shared.
    void share_first_only();

    uint64_t bytes() const;
    uint64_t used() const;
    uint8_t* address(uint64_t offset) const { return heap_->base() + offset; }
    // True where [address, address + bytes) lies in this arena, and all peers have it mapped.
    bool contains(const void* address, uint64_t bytes) const;

  private:
    // With the mutex held.
    std::optional<uint64_t> take(uint64_t bytes, uint64_t end);
    void give(uint64_t begin, uint64_t bytes);
    void grow(uint64_t bytes);

    const std::shared_ptr<Heap> heap_;
    const uint64_t offset_;
    const uint64_t max_;
    const bool poison_;
    const uint64_t first_end_;  // where that ended which was there at first; all three are offsets into the heap
    mutable std::mutex mutex_;
    uint64_t end_;                         // of what is there
    uint64_t shared_end_;                  // of what all peers have mapped
    std::map<uint64_t, uint64_t> gaps_;    // offset -> bytes, no two adjacent
    std::map<uint64_t, uint64_t> blocks_;  // offset -> bytes
};

}  // namespace deep_ep::host
