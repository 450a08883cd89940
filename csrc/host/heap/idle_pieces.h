// Which pieces of an arena take memory although no output has been in them for a long time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace deep_ep::host {

// An arena's pages exist from their first use. Writing a page for the first time takes about twenty times as long as
// writing one that exists (1 ms and 0.05 ms per MiB), so a piece keeps its pages for the outputs to come, and is given
// back only after kOperations operations without an output in it. Hence no page is made anew more than once in
// kOperations operations.
//
// Not thread-safe.
class IdlePieces {
  public:
    static constexpr uint64_t kBytes = 64 << 10;  // of a piece, whole pages
    static constexpr uint64_t kOperations = 512;  // more than a step of a deep model, whose outputs come back
    static constexpr size_t kLooks = 256;         // pieces looked at per operation: 0.4 us
    static constexpr size_t kGivenBack = 16;      // pieces given back per operation: 0.2 to 0.4 ms

    // Gives memory at an offset back to the system. Returns whether it has.
    using GiveBack = std::function<bool(uint64_t offset, uint64_t bytes)>;

    // An arena is at these offsets of a heap. Pieces begin at multiples of kBytes; one that is only partly in the arena
    // is never given back.
    IdlePieces(uint64_t begin, uint64_t end) : begin_(begin), end_(end), first_(begin / kBytes) {}

    void take(uint64_t offset, uint64_t bytes);
    void release(uint64_t offset, uint64_t bytes);
    // Counts an operation, and gives back some of the pieces that are due.
    void next_operation(const GiveBack& give_back);

    // Bytes of the pieces that have been used since they were last given back: at least what their pages take.
    uint64_t resident() const { return resident_; }
    // Bytes given back so far.
    uint64_t returned() const { return returned_; }

  private:
    struct Piece {
        uint64_t released = 0;  // the operation in which it was last released
        uint32_t blocks = 0;    // outputs that are at least partly in it
        bool resident = false;
    };

    size_t index_of(uint64_t offset) const { return static_cast<size_t>(offset / kBytes - first_); }
    uint64_t offset_of(size_t index) const { return (first_ + index) * kBytes; }
    uint64_t bytes_of(size_t index) const;
    bool is_due(size_t index) const;

    const uint64_t begin_, end_, first_;
    std::vector<Piece> pieces_;  // up to the last one that has been used
    uint64_t operation_ = 0;
    size_t next_ = 0;  // to look at; goes round
    uint64_t resident_ = 0;
    uint64_t returned_ = 0;
};

}  // namespace deep_ep::host
