// The whole work of a rank's proxy as one step, which is repeated by a thread, by an agent of the executor, or by a
// thread that waits for its results.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "host/network/network.h"
#include "host/network/proxy/receiver.h"
#include "host/network/proxy/sender.h"

namespace deep_ep::host::proxy {

class Progress {
  public:
    struct Clock {
        std::function<u64()> now_ns;
        u64 patience_ns;  // from the failure of a link until kernels are notified: see told_later()
    };
    Progress(const NetworkPlace& place, std::unique_ptr<Transport> transport, Clock clock);

    fabric::Proxy* state() const { return state_.get(); }
    u64 max_put_bytes(u32 pieces) const;
    // One thread at a time. Returns whether there was anything to do.
    bool step();
    bool has_work() const;
    int look_up_peers() { return transport_->look_up_peers(); }
    // Whether a message is in flight or waits for its link. For the thread that steps.
    bool is_open() const { return sender_.is_open(); }
    // Does not wait for a link that has failed. May be called by any thread.
    bool idle() const { return rings_.idle() || !fault().empty(); }
    // Whether all unfinished work is for ranks that are gone. Like step(): one thread at a time.
    bool waits_for_gone_alone() const;

    // A description of the failure. May be called by any thread.
    std::string fault() const;
    std::vector<nic::Counters> counters() const { return sender_.counters(); }

  private:
    struct Failed {
        Sender::Fault fault;
        u64 since_ns;
    };
    bool work();
    bool told_later(const Failed& failed) const;
    void tell(u32 peer, u32 error, std::string text);

    const NetworkPlace place_;
    const Clock clock_;
    const std::unique_ptr<Transport> transport_;
    CommandRings rings_;
    Sender sender_;
    Receiver receiver_;
    const std::shared_ptr<u64> fault_;
    const std::shared_ptr<fabric::Proxy> state_;
    Events events_;
    std::vector<Failed> faults_;
    bool failed_ = false;
    mutable std::mutex mutex_;  // guards `fault_text_`
    std::string fault_text_;
};

}  // namespace deep_ep::host::proxy
