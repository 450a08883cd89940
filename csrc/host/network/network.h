// What carries puts to ranks that are not mapped.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nic/options.h"

namespace deep_ep::fabric {
struct WeakQueue;
struct Ibgda;
}  // namespace deep_ep::fabric

namespace deep_ep::host {

class Network {
  public:
    virtual ~Network() = default;
    // What kernels post to: one of these.
    virtual fabric::WeakQueue* weak_queue() { return nullptr; }
    virtual fabric::Ibgda* ibgda() { return nullptr; }
    // The most bytes that one put may have.
    virtual uint64_t most_put_bytes() const { return UINT64_MAX; }
    // All that kernels have posted, and that is not an operation's to wait for, has left.
    virtual bool idle() const { return true; }
    // What kernels have written that a NIC would refuse; empty where all is well.
    virtual std::string refusal() const { return {}; }
    // By peer, and in the order of the requests; empty where nothing counts.
    virtual std::vector<nic::Counters> counters() const { return {}; }
    virtual std::vector<nic::Message> trace() const { return {}; }
};

}  // namespace deep_ep::host
