// The symmetric heaps: a file for each PE, mapped once for each party that reaches it by addresses of its own. Kernels
// of this PE see its own heap and those of its node's PEs; its NICs see all heaps, at other addresses.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "settings.h"

namespace nvshmem_double {

class Heap {
  public:
    // Space before all allocations, for barriers and foreign posts. Because of it, the first allocation begins within a
    // chunk of keys, and its address is no more aligned than requested.
    static constexpr uint64_t kReserved = (40 << 10) + 512;
    static constexpr uint64_t kAlignment = 512;         // of allocations that specify none
    static constexpr uint64_t kMaxAlignment = 1 << 29;  // of a heap

    Heap(const Settings& settings, const std::string& folder, int pe, int pes);
    ~Heap();
    Heap(const Heap&) = delete;
    Heap& operator=(const Heap&) = delete;

    uint64_t bytes() const { return bytes_; }
    uint8_t* base() const { return by_kernels_[static_cast<size_t>(pe_)]; }
    // Where kernels of this PE access another PE's heap; null if they cannot.
    uint8_t* near(int pe) const { return by_kernels_[static_cast<size_t>(pe)]; }
    uint8_t* for_nics(int pe) const { return by_nics_[static_cast<size_t>(pe)]; }

    // Yields the same offset on all PEs, if they allocate and free in the same order. Returns false if there is no
    // room.
    bool allocate(uint64_t alignment, uint64_t bytes, uint64_t& offset);
    // Returns false if no allocation begins there.
    bool free(uint64_t offset) { return allocated_.erase(offset) == 1; }
    bool contains(const void* address) const {
        const auto* place = static_cast<const uint8_t*>(address);
        return place >= base() && place < base() + bytes_;
    }
    uint64_t end() const;  // of the last allocation

  private:
    const int pe_;
    const uint64_t bytes_;
    std::vector<uint8_t*> by_kernels_, by_nics_;  // [PEs]
    std::map<uint64_t, uint64_t> allocated_;      // bytes by offset
};

}  // namespace nvshmem_double
