// The memory of one rank's heap, and the mappings of other ranks' heaps in this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace deep_ep::host {

// A mapping, unmapped with its last owner. Owners are the Buffer, its peers in the same process, and every output
// tensor.
//
// The whole address range is reserved at once, but possibly only the first part is backed by memory. Such a heap grows
// at its end by pieces, which its owner adds and other processes map one by one as the owner announces them (P10).
class Heap {
  public:
    struct Piece {
        size_t offset;
        size_t bytes;
    };

    // `gives_back`: gives_back(). Must be false for memory that is pinned: what pins it would keep using the old pages.
    //
    // Plain memory, for ranks that are all in this process.
    static std::shared_ptr<Heap> make_plain(size_t bytes, bool gives_back = false);
    // Anonymous shared memory: peers get the file descriptor, and nothing is left behind when the processes die. Its
    // size is sealed.
    static std::shared_ptr<Heap> make_shared(size_t bytes, bool gives_back = false);
    // Maps a peer's heap. Refuses one whose size is not sealed or is not `bytes`. The descriptor may be closed
    // afterwards.
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
    // Bytes from the base that are backed by memory in this process. One thread grows or maps; any may call this.
    virtual size_t mapped() const { return bytes_; }
    // Adds a piece of the given size, rounded up and limited by the address range. Returns false if none is left.
    virtual bool grow(size_t) { return false; }
    // The added pieces in order, without the first one.
    virtual std::vector<Piece> added() const { return {}; }
    // export_piece() returns a descriptor of a piece, which the caller closes. map_piece() maps the next piece of a
    // peer, whose descriptor may be closed afterwards.
    virtual int export_piece(const Piece&) const { throw std::logic_error("this heap does not grow"); }
    virtual void map_piece(const Piece&, int) { throw std::logic_error("this heap does not grow"); }
    // Whether unused pages may be given back to the system.
    virtual bool gives_back() const { return false; }
    // Gives whole pages back, those of all mappings at once. From then on they read as zeros, and an access makes them
    // anew. Returns false if the system refuses.
    virtual bool give_back(size_t, size_t) { return false; }
    void close_descriptor();
    // Maps the first bytes of shared memory a second time, at other addresses, as long as the result lives.
    std::shared_ptr<uint8_t> map_again(size_t bytes) const;
    // Keeps `user`, which needs the memory mapped, as long as the heap.
    void keep(std::shared_ptr<void> user) { user_ = std::move(user); }

  private:
    uint8_t* base_;
    size_t bytes_;
    int descriptor_;
    std::shared_ptr<void> mapping_;
    std::shared_ptr<void> user_;  // destroyed before the mapping
};

}  // namespace deep_ep::host
