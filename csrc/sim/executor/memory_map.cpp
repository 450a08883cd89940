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

bool MemoryMap::shared(const void* address, int rank) const {
    const u64 at = reinterpret_cast<u64>(address);
    auto after = [](u64 value, const Range& range) { return value < range.begin; };
    auto next = std::upper_bound(ranges_.begin(), ranges_.end(), at, after);
    if (next == ranges_.begin()) return false;
    const Range& range = *std::prev(next);
    return at < range.end && range.owner != rank;
}

}  // namespace deep_ep::cpu
