// The near parts of all ranks' heaps, as one rank's host reaches them.
#pragma once

#include <memory>
#include <vector>

#include "host/heap/heap.h"

namespace deep_ep::host {

class NearParts {
  public:
    NearParts() = default;  // the parts coincide; of() must not be called
    // `own`: by rank, the allocation of its near part, null where this process does not reach it; empty if the near
    // parts coincide with the far parts, `heaps`.
    NearParts(const std::vector<std::shared_ptr<Heap>>& heaps, std::vector<std::shared_ptr<Heap>> own)
        : own_(std::move(own)) {
        for (size_t rank = 0; rank < heaps.size(); ++rank) {
            bases_.push_back(own_.empty() ? heaps[rank]->base() : base_of(own_[rank]));
        }
    }

    // Null: this process does not reach it.
    uint8_t* of(int rank) const { return bases_[static_cast<size_t>(rank)]; }
    bool coincide() const { return own_.empty(); }

  private:
    static uint8_t* base_of(const std::shared_ptr<Heap>& heap) { return heap ? heap->base() : nullptr; }

    std::vector<std::shared_ptr<Heap>> own_;  // keeps them mapped
    std::vector<uint8_t*> bases_;
};

}  // namespace deep_ep::host
