#include "host/heap/arena.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "wire/heap_layout.h"

namespace deep_ep::host {
namespace {

constexpr uint64_t kAlignment = 256;  // whole cache lines, and suitable for bulk copies of a GPU
constexpr uint64_t kMinGrowth = 4;    // a piece is at least 1/kMinGrowth of the arena, so that there are few

uint64_t block_bytes(uint64_t bytes) { return wire::align_up(bytes == 0 ? 1 : bytes, kAlignment); }

}  // namespace

Arena::Arena(std::shared_ptr<Heap> heap, uint64_t offset, uint64_t most, bool poison)
    : heap_(std::move(heap)),
      offset_(offset),
      max_(most),
      poison_(poison),
      first_end_(std::min<uint64_t>(heap_->mapped(), offset + most)),
      end_(first_end_),
      shared_end_(first_end_) {
    if (end_ > offset_) gaps_.emplace(offset_, end_ - offset_);
    if (heap_->gives_back()) idle_.emplace(offset, offset + most);
}

std::optional<uint64_t> Arena::allocate(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    return take(block_bytes(bytes), shared_end_);
}

std::optional<uint64_t> Arena::allocate_ahead(uint64_t bytes) {
    bytes = block_bytes(bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto offset = take(bytes, end_)) return offset;
    grow(bytes);
    return take(bytes, end_);
}

// Grows so that a block of `bytes` fits; does nothing if it cannot fit.
void Arena::grow(uint64_t bytes) {
    const auto last = gaps_.empty() ? gaps_.end() : std::prev(gaps_.end());
    const bool open = last != gaps_.end() && last->first + last->second == end_;
    const uint64_t missing = bytes - (open ? last->second : 0), left = offset_ + max_ - end_;
    if (missing > left) return;
    const uint64_t wanted = std::min(std::max(missing, (end_ - offset_) / kMinGrowth), left);
    try {
        if (!heap_->grow(wanted)) return;
    } catch (const std::runtime_error&) {  // the GPU's memory is full, but a smaller piece may fit
        if (wanted == missing || !heap_->grow(missing)) throw;
    }
    const uint64_t end = std::min<uint64_t>(heap_->mapped(), offset_ + max_);
    give(end_, end - end_);
    end_ = end;
}

void Arena::share(uint64_t heap_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    shared_end_ = std::max(shared_end_, std::min(heap_bytes, end_));
}

void Arena::share_first_only() {
    std::lock_guard<std::mutex> lock(mutex_);
    shared_end_ = first_end_;
}

std::optional<uint64_t> Arena::take(uint64_t bytes, uint64_t end) {
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
        const auto [offset, available] = *gap;
        if (available < bytes || offset + bytes > end) continue;
        gaps_.erase(gap);
        if (available > bytes) gaps_.emplace(offset + bytes, available - bytes);
        blocks_.emplace(offset, bytes);
        if (idle_) idle_->take(offset, bytes);
        if (poison_) std::memset(address(offset), kPoison, bytes);
        return offset;
    }
    return std::nullopt;
}

void Arena::release(uint64_t offset) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(offset);
    if (block == blocks_.end()) throw std::logic_error("arena: released a block that was not allocated");
    const auto [begin, bytes] = *block;
    blocks_.erase(block);
    if (idle_) idle_->release(begin, bytes);
    give(begin, bytes);
}

void Arena::give(uint64_t begin, uint64_t bytes) {
    auto next = gaps_.lower_bound(begin);
    if (next != gaps_.end() && begin + bytes == next->first) {
        bytes += next->second;
        next = gaps_.erase(next);
    }
    if (next != gaps_.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == begin) {
            begin = previous->first;
            bytes += previous->second;
            gaps_.erase(previous);
        }
    }
    gaps_.emplace(begin, bytes);
}

void Arena::next_operation() {
    if (!idle_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    idle_->next_operation([this](uint64_t offset, uint64_t bytes) { return heap_->give_back(offset, bytes); });
}

uint64_t Arena::bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return end_ - offset_;
}

uint64_t Arena::used() const {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t used = 0;
    for (const auto& [offset, bytes] : blocks_) used += bytes;
    return used;
}

uint64_t Arena::resident() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return idle_ ? idle_->resident() : end_ - offset_;
}

uint64_t Arena::returned() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return idle_ ? idle_->returned() : 0;
}

bool Arena::contains(const void* address, uint64_t bytes) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto base = reinterpret_cast<uintptr_t>(heap_->base()), at = reinterpret_cast<uintptr_t>(address);
    return at >= base + offset_ && at + bytes <= base + shared_end_;
}

}  // namespace deep_ep::host
