// The proxy of a rank that is a process or whose kernels run on a GPU: a dedicated thread. It polls for commands, since
// a replayed graph leaves some without any call by the host. One second after the last command, message, or completion
// it goes to sleep and polls only occasionally (looks.h).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "host/network/proxy/proxy_network.h"

namespace deep_ep::host::proxy {

class Thread : public ProxyNetwork {
  public:
    Thread(const NetworkPlace& place, std::unique_ptr<Transport> transport);
    ~Thread() override;
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;

    int look_up_peers() override;
    bool idle() const override;
    std::vector<nic::Counters> counters() const override;

  protected:
    // Called by another thread: steps the proxy, while `thread_` rests. Returns whether there was anything to do.
    bool help();

  private:
    void run(const std::vector<int>& cpus);

    mutable std::mutex stepping_;  // held by the thread that steps the proxy
    std::atomic<uint64_t> helped_{0};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace deep_ep::host::proxy
