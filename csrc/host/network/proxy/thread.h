// The proxy of a rank that is a process or whose kernels run on a GPU: a dedicated thread. It polls for commands, since
// a replayed graph leaves some without any call by the host. Where kernels run on the executor, the thread that runs
// them also steps the proxy, between turns of the kernels, and this thread rests meanwhile. One second after the last
// command, message, or completion it goes to sleep and polls only occasionally (looks.h).
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "host/network/proxy/proxy_network.h"

namespace deep_ep::host::proxy {

class Thread final : public ProxyNetwork {
  public:
    explicit Thread(const NetworkPlace& place);
    ~Thread() override;
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;

    int look_up_peers() override;
    bool idle() const override;
    std::vector<nic::Counters> counters() const override;

  private:
    void run(const std::vector<int>& cpus);
    bool help();

    mutable std::mutex stepping_;  // held by the thread that steps the proxy
    std::atomic<uint64_t> helped_{0};
    std::atomic<bool> stopping_{false};
    int helper_ = -1;  // of the executor
    std::thread thread_;
};

}  // namespace deep_ep::host::proxy
