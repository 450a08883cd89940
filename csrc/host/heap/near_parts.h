// The near parts of all ranks' heaps, as one rank's host reaches them.
#pragma once

#include <memory>
#include <vector>

#include "host/heap/heap.h"
#include "wire/heap_layout.h"

namespace deep_ep::host {

class NearParts {
  public:
    NearParts() = default;  // in the headers
    // `own`: by rank, the memory that holds nothing but its near part, null where this process does not reach it; empty
    // if the near parts are in the headers of the heaps.
    NearParts(const std::vector<std::shared_ptr<Heap>>& heaps, std::vector<std::shared_ptr<Heap>> own)
        : own_(std::move(own)) {
        for (size_t rank = 0; rank < heaps.size(); ++rank) {
            wire::NearPart* const in_header = &reinterpret_cast<wire::HeapHeader*>(heaps[rank]->base())->near;
            parts_.push_back(own_.empty() ? in_header : at(own_[rank]));
        }
    }

    // Null: this process does not reach it.
    wire::NearPart* of(int rank) const { return parts_[static_cast<size_t>(rank)]; }
    bool in_headers() const { return own_.empty(); }

  private:
    static wire::NearPart* at(const std::shared_ptr<Heap>& heap) {
        return heap ? reinterpret_cast<wire::NearPart*>(heap->base()) : nullptr;
    }

    std::vector<std::shared_ptr<Heap>> own_;  // keeps them mapped
    std::vector<wire::NearPart*> parts_;
};

}  // namespace deep_ep::host
