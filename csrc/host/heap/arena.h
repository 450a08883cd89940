// The part of a heap from which outputs are allocated: tensors that peers store to and load from.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "host/heap/heap.h"
#include "host/heap/idle_pieces.h"

namespace deep_ep::host {

// Fills memory before its first use, so that reads of memory that was never written become visible.
constexpr int kPoison = 0xA5;

// First fit at the lowest address, so that memory already touched is reused. Any thread may release, since tensors may
// be destroyed on any thread.
//
// If the heap grows, so does the arena: from its size when the Buffer is made up to `most` bytes. Peers can use only
// the part that they have mapped, that is, the part that has been shared with them; memory beyond must be shared first
// (P10).
//
// Released memory may be given to another output at once, whose owner may write it without asking any peer. The
// caller that releases it therefore knows that no peer stores or loads there for this Buffer any longer: a tensor is
// held until its operation's kernels have ended well, and these end when all stores to outputs have arrived and all
// readers are done (P7, P12); if they fail, until the second meeting of a recovery (P16); if they never end, forever.
// Giving pages back to the system relies on the same, and on nothing else: it is a store of zeros. A peer that accesses
// them nevertheless, for instance one that has been masked, loads zeros or makes pages anew, which is harmless.
class Arena {
  public:
    Arena(std::shared_ptr<Heap> heap, uint64_t offset, uint64_t most, bool poison);

    // Returns the heap offset of memory that all peers have mapped, or nothing if no gap is large enough.
    std::optional<uint64_t> allocate(uint64_t bytes);
    // The same, but may return memory that peers have not mapped yet; if there is none, the heap grows. Throws the
    // driver's error if that fails.
    std::optional<uint64_t> allocate_ahead(uint64_t bytes);
    void release(uint64_t offset);

    // All peers map this part of the heap before they launch the operation of this rank's next offer.
    void share(uint64_t heap_bytes);
    // It is no longer known which peers have mapped the added memory, so it counts as not shared until shared again.
    void share_first_only();

    // Called at the beginning of each operation. If the heap gives pages back, returns some of those that no output has
    // used for long. While there are such pages, this takes up to 0.4 ms, in which no other thread can allocate or
    // release; otherwise up to 0.4 us.
    void next_operation();

    uint64_t bytes() const;
    uint64_t used() const;
    // The part of bytes() that takes memory, or slightly more. All of it if the heap does not give pages back.
    uint64_t resident() const;
    // Bytes that have been given back to the system so far.
    uint64_t returned() const;
    uint8_t* address(uint64_t offset) const { return heap_->base() + offset; }
    // Whether [address, address + bytes) is in this arena and all peers have it mapped.
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
    const uint64_t first_end_;  // end of the initial memory; all three ends are offsets into the heap
    mutable std::mutex mutex_;
    uint64_t end_;                         // end of the existing memory
    uint64_t shared_end_;                  // end of the memory that all peers have mapped
    std::map<uint64_t, uint64_t> gaps_;    // offset -> bytes, no two adjacent
    std::map<uint64_t, uint64_t> blocks_;  // offset -> bytes
    std::optional<IdlePieces> idle_;       // if the heap gives pages back
};

}  // namespace deep_ep::host
