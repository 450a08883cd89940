// The memory behind one rank's heap, and other ranks' heaps as this process sees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace deep_ep::host {

// A mapping, unmapped with its last owner: the Buffer, its peers in the same process, and every output tensor.
//
// Its addresses are reserved at once. There may be memory behind the first of them alone: such a heap grows at its end
// by pieces, which its owner adds and other processes map one by one, as the owner announces them (P10).
class Heap {
  public:
    struct Piece {
        size_t offset;
        size_t bytes;
    };

    // Plain memory: all ranks live in this process.
    static std::shared_ptr<Heap> make_plain(size_t bytes);
    // Shared memory without a name: peers get the file descriptor, and nothing is left behind when the processes die.
    // Its size is sealed.
    static std::shared_ptr<Heap> make_shared(size_t bytes);
    // A peer's heap; refused unless its size is sealed, and is this one. The descriptor may be closed afterwards.
    static std::shared_ptr<Heap> map(int descriptor, size_t bytes);

    // Memory that `mapping` keeps mapped.
    Heap(uint8_t* base, size_t bytes, int descriptor, std::shared_ptr<void> mapping)
        : base_(base), bytes_(bytes), descriptor_(descriptor), mapping_(std::move(mapping)) {}
    virtual ~Heap() { close_descriptor(); }
    Heap(const Heap&) = delete;
    Heap& operator=(const Heap&) = delete;

    uint8_t* base() const { return base_; }
    size_t bytes() const { return bytes_; }
    int descriptor() const { return descriptor_; }  // -1: plain memory, or a peer's
    // Bytes from the base on that there is memory behind, here. One thread grows or maps; any may ask.
    virtual size_t mapped() const { return bytes_; }
    // Adds a piece of so many bytes, rounded up, but no more than there are addresses for. False: none are left.
    virtual bool grow(size_t) { return false; }
    // The pieces that have been added, in their order: not the first.
    virtual std::vector<Piece> added() const { return {}; }
    // A descriptor of one of them, the caller's to close; and a peer's next one, whose descriptor may be closed after.
    virtual int export_piece(const Piece&) const { throw std::logic_error("this heap does not grow"); }
    virtual void map_piece(const Piece&, int) { throw std::logic_error("this heap does not grow"); }
    void close_descriptor();
    // Of memory that is shared between processes: the first bytes under other addresses, mapped as long as this lives.
    std::shared_ptr<uint8_t> map_again(size_t bytes) const;
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
