// The memory behind one rank's heap, and other ranks' heaps as this process sees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace deep_ep::host {

// A mapping, unmapped with its last owner: the Buffer, its peers in the same process, and every output tensor.
class Heap {
  public:
    // Plain memory: all ranks live in this process.
    static std::shared_ptr<Heap> make_plain(size_t bytes);
    // Shared memory without a name: peers get the file descriptor, and nothing is left behind when the processes die.
    static std::shared_ptr<Heap> make_shared(size_t bytes);
    // A peer's heap. The descriptor may be closed afterwards.
    static std::shared_ptr<Heap> map(int descriptor, size_t bytes);

    // Memory that `mapping` keeps mapped.
    Heap(uint8_t* base, size_t bytes, int descriptor, std::shared_ptr<void> mapping)
        : base_(base), bytes_(bytes), descriptor_(descriptor), mapping_(std::move(mapping)) {}
    ~Heap() { close_descriptor(); }
    Heap(const Heap&) = delete;
    Heap& operator=(const Heap&) = delete;

    uint8_t* base() const { return base_; }
    size_t bytes() const { return bytes_; }
    int descriptor() const { return descriptor_; }  // -1: plain memory, or a peer's
    void close_descriptor();
    // Keeps `user`, something that needs the memory mapped, as long as the heap.
    void keep(std::shared_ptr<void> user) { user_ = std::move(user); }

  private:
    uint8_t* base_;
    size_t bytes_;
    int descriptor_;
    std::shared_ptr<void> mapping_;
    std::shared_ptr<void> user_;  // goes before the mapping
};

}  // namespace deep_ep::host
