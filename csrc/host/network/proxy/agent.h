// The proxy of a rank that is a thread of this process, beside kernels that the executor runs: an agent of it, so that
// a seed says all.
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
