// A rank's software NICs as agents of the executor, one per queue pair; used when all ranks are in this process.
#pragma once

#include "sim/nic/network/queue_pairs.h"

namespace deep_ep::host {

class NicAgents final : public NicQueuePairs {
  public:
    explicit NicAgents(const NetworkPlace& place);

  private:
    struct Agent {
        explicit Agent(int number) : id(number) {}
        ~Agent();
        const int id;
    };

    void serve(nic::SendQueue& queue);

    std::vector<std::unique_ptr<Agent>> agents_;
};

}  // namespace deep_ep::host
