// What carries puts to ranks that are not mapped.
#pragma once

namespace deep_ep::fabric {
struct WeakQueue;
}

namespace deep_ep::host {

class Network {
  public:
    virtual ~Network() = default;
    virtual fabric::WeakQueue* weak_queue() = 0;
};

}  // namespace deep_ep::host
