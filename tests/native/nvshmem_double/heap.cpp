#include "heap.h"

#include "shared_file.h"

namespace nvshmem_double {
namespace {

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Heap::Heap(const Settings& settings, const std::string& folder, int pe, int pes)
    : pe_(pe), bytes_(round_up(settings.heap_bytes, uint64_t{1} << settings.chunk_log2)) {
    const int per_node = settings.pes_per_node == 0 ? pes : settings.pes_per_node;
    for (int other = 0; other < pes; ++other) {
        const std::string file = folder + "/heap_" + std::to_string(other);
        const auto map = [&] { return static_cast<uint8_t*>(map_shared(file, bytes_, kMaxAlignment)); };
        const bool near = other == pe || (settings.p2p && other / per_node == pe / per_node);
        by_kernels_.push_back(near ? map() : nullptr);
        by_nics_.push_back(map());
    }
}

Heap::~Heap() {
    for (uint8_t* memory : by_kernels_) {
        if (memory != nullptr) unmap_shared(memory, bytes_);
    }
    for (uint8_t* memory : by_nics_) unmap_shared(memory, bytes_);
}

bool Heap::allocate(uint64_t alignment, uint64_t bytes, uint64_t& offset) {
    uint64_t at = round_up(kReserved, alignment);
    for (const auto& [begin, size] : allocated_) {
        if (at + bytes <= begin) break;
        at = round_up(begin + size, alignment);
    }
    if (bytes > bytes_ || at > bytes_ - bytes) return false;
    allocated_[at] = bytes;
    offset = at;
    return true;
}

uint64_t Heap::end() const {
    return allocated_.empty() ? kReserved : allocated_.rbegin()->first + allocated_.rbegin()->second;
}

}  // namespace nvshmem_double
