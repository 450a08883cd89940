// A proxy as a Network. Subclasses supply the thread or agent that steps it.
#pragma once

#include "host/network/network.h"
#include "host/network/proxy/progress.h"

namespace deep_ep::host::proxy {

class ProxyNetwork : public Network {
  public:
    void* state() override { return progress_.state(); }
    uint64_t max_put_bytes(uint32_t pieces) const override { return progress_.max_put_bytes(pieces); }
    int look_up_peers() override { return progress_.look_up_peers(); }
    bool idle() const override { return progress_.idle(); }
    std::string fault() const override { return progress_.fault(); }
    std::vector<nic::Counters> counters() const override { return progress_.counters(); }

  protected:
    ProxyNetwork(const NetworkPlace& place, std::unique_ptr<Transport> transport, Progress::Clock clock)
        : progress_(place, std::move(transport), std::move(clock)) {}

    Progress progress_;
};

}  // namespace deep_ep::host::proxy
