// The proxy of a rank that is a thread of this process and whose kernels run on the executor: an agent of the executor,
// so that a seed determines everything.
#pragma once

#include "host/network/proxy/proxy_network.h"

namespace deep_ep::host::proxy {

class Agent final : public ProxyNetwork {
  public:
    explicit Agent(const NetworkPlace& place);
    ~Agent() override;
    Agent(const Agent&) = delete;
    Agent& operator=(const Agent&) = delete;

  private:
    void serve();

    const u32 max_delay_;
    int agent_ = -1;
};

}  // namespace deep_ep::host::proxy
