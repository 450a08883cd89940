// The proxy of a rank that is a thread of this process, beside kernels that the executor runs: an agent of it, so that
// a seed says all.
#pragma once

#include "host/network/network.h"
#include "host/network/proxy/progress.h"

namespace deep_ep::host::proxy {

class Agent final : public Network {
  public:
    explicit Agent(const NetworkPlace& place);
    ~Agent() override;
    Agent(const Agent&) = delete;
    Agent& operator=(const Agent&) = delete;

    void* state() override { return progress_.state(); }
    uint64_t most_put_bytes(uint32_t pieces) const override { return progress_.most_put_bytes(pieces); }
    bool idle() const override { return progress_.idle(); }
    std::string fault() const override { return progress_.fault(); }
    std::vector<nic::Counters> counters() const override { return progress_.counters(); }

  private:
    void serve();

    const u32 most_delay_;
    Progress progress_;
    int agent_ = -1;
};

}  // namespace deep_ep::host::proxy
