// The agent behind fabric/weak.h: executes puts late, in pieces, and out of order.
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/weak.h"
#include "host/network/network.h"

namespace deep_ep::host {

// Owns a rank's queue and the fiber that serves it.
class WeakAgent final : public Network {
  public:
    explicit WeakAgent(const NetworkPlace& place);
    ~WeakAgent() override;
    WeakAgent(const WeakAgent&) = delete;
    WeakAgent& operator=(const WeakAgent&) = delete;

    void* state() override { return &queue_; }

  private:
    void serve();

    fabric::WeakQueue queue_{};
    const NetworkPlace place_;
    const std::vector<uint8_t*>& heaps_;
    const uint8_t* const local_;
    int agent_ = -1;
};

}  // namespace deep_ep::host
