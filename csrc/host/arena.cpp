#include "host/arena.h"

#include <cstring>
#include <stdexcept>

#include "wire/heap_layout.h"

namespace deep_ep::host {
namespace {

constexpr uint64_t kAlignment = 256;  // whole cache lines, and what a GPU's bulk copies like

}  // namespace

Arena::Arena(std::shared_ptr<Heap> heap, uint64_t offset, uint64_t bytes, bool poison)
    : heap_(std::move(heap)), offset_(offset), bytes_(bytes), poison_(poison) {
    if (bytes_ != 0) gaps_.emplace(offset_, bytes_);
}

std::optional<uint64_t> Arena::allocate(uint64_t bytes) {
    bytes = wire::align_up(bytes == 0 ? 1 : bytes, kAlignment);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
        const auto [offset, available] = *gap;
        if (available < bytes) continue;
        gaps_.erase(gap);
        if (available > bytes) gaps_.emplace(offset + bytes, available - bytes);
        blocks_.emplace(offset, bytes);
        if (poison_) std::memset(address(offset), kPoison, bytes);
        return offset;
    }
    return std::nullopt;
}

void Arena::release(uint64_t offset) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(offset);
    if (block == blocks_.end()) throw std::logic_error("arena: released a block that was not allocated");
    uint64_t begin = block->first, bytes = block->second;
    blocks_.erase(block);
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

uint64_t Arena::used() const {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t used = 0;
    for (const auto& [offset, bytes] : blocks_) used += bytes;
    return used;
}

bool Arena::contains(const void* address, uint64_t bytes) const {
    const auto begin = reinterpret_cast<uintptr_t>(heap_->base() + offset_);
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at >= begin && at + bytes <= begin + bytes_;
}

}  // namespace deep_ep::host
