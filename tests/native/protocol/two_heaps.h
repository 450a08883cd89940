// Two ranks' heaps, and networks between them, without Buffers.
#pragma once

#include <memory>

#include "host/network/networks.h"
#include "sim/host/memory.h"
#include "wire/heap_layout.h"

namespace protocol {

using namespace deep_ep;

class TwoHeaps {
  public:
    TwoHeaps(const wire::HeapLayout& layout, const nic::Options& options) : layout_(layout), options_(options) {
        constexpr size_t kLine = 64;
        for (int rank = 0; rank < 2; ++rank) {
            memory_[rank] = std::make_unique<u8[]>(layout.bytes() + kLine);
            const auto address = reinterpret_cast<uintptr_t>(memory_[rank].get());
            heaps_[rank] = reinterpret_cast<u8*>((address + kLine - 1) & ~(kLine - 1));
        }
    }
    u8* operator[](int rank) const { return heaps_[rank]; }
    // The place of a rank's network that reaches the other rank.
    host::NetworkPlace place(int rank, host::Memory& memory, u32 generation) const {
        host::NetworkPlace place{};
        place.rank = rank;
        place.heaps = {heaps_[0], heaps_[1]};
        place.layout = layout_;
        place.generation = generation;
        place.memory = &memory;
        place.kernels_on_cpu = place.in_process = true;
        place.nic = options_;
        return place;
    }

  private:
    const wire::HeapLayout layout_;
    const nic::Options options_;
    std::unique_ptr<u8[]> memory_[2];
    u8* heaps_[2];
};

}  // namespace protocol
