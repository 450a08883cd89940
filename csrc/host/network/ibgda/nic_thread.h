// A rank's software NICs as one thread of the host. It reaches the heaps of other processes through shared memory, and
// what a GPU's kernels post through memory that the GPU has mapped.
#pragma once

#include <atomic>
#include <string>
#include <thread>

#include "host/network/ibgda/soft_nic.h"

namespace deep_ep::host {

class NicThread final : public SoftNic {
  public:
    explicit NicThread(const NetworkPlace& place);
    ~NicThread() override;

    std::string refusal() const override;

  private:
    void serve();

    mutable std::mutex mutex_;
    std::string refusal_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace deep_ep::host
