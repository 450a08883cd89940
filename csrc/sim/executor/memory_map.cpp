#include "sim/executor/memory_map.h"

#include <algorithm>

namespace deep_ep::cpu {

void MemoryMap::add(const void* begin, size_t bytes, int owner) {
    const u64 first = reinterpret_cast<u64>(begin);
    auto after = [](u64 address, const Range& range) { return address < range.begin; };
    ranges_.insert(std::upper_bound(ranges_.begin(), ranges_.end(), first, after), {first, first + bytes, owner});
}

void MemoryMap::remove(const void* begin) {
    const u64 first = reinterpret_cast<u64>(begin);
    auto found = std::find_if(ranges_.begin(), ranges_.end(), [=](const Range& range) { return range.begin == first; });
    if (found != ranges_.end()) ranges_.erase(found);
}

const MemoryMap::Range* MemoryMap::find(const void* address) const {
    const u64 at = reinterpret_cast<u64>(address);
    auto after = [](u64 value, const Range& range) { return value < range.begin; };
    auto next = std::upper_bound(ranges_.begin(), ranges_.end(), at, after);
    return next != ranges_.begin() && at < std::prev(next)->end ? &*std::prev(next) : nullptr;
}

bool MemoryMap::shared(const void* address, int rank) const {
    const Range* const range = find(address);
    return range != nullptr && range->owner != rank;
}

}  // namespace deep_ep::cpu
