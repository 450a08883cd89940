// A transport between ranks of one process, for tests. It is as bad as a network may be: messages are late and pass
// each other, their bytes are read from the source and placed in pieces up to the last moment, an immediate comes
// before the sender's completion or after it, and now and then twice; a link may fail, or take nothing and say nothing.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "host/network/network.h"
#include "host/network/proxy/transport.h"
#include "observe/observer.h"

namespace deep_ep::host::proxy {

class Loopback final : public Transport {
  public:
    using Random = std::function<u32(u32 bound)>;

    Loopback(const NetworkPlace& place, Random random);
    ~Loopback() override;
    Loopback(const Loopback&) = delete;
    Loopback& operator=(const Loopback&) = delete;

    std::string name() const override { return "the loopback"; }
    u64 max_bytes() const override { return place_.nic.max_bytes; }
    bool post(const Message& message) override;
    bool takes(u32 peer) const override;
    bool has_work() const override;
    bool poll(Events& events) override;
    std::string text(u32 error) const override;

  private:
    observe::Accessor accessor() const { return observe::proxy(static_cast<u32>(place_.rank)); }
    // What peers leave for a rank.
    struct Inbox {
        std::mutex mutex;
        std::deque<u32> immediates;
        void add(u32 immediate);
    };
    struct Flight {
        Message message;
        u64 placed = 0;  // bytes
        bool arrived = false;
        bool completed = false;
    };
    struct Link {
        u32 flying = 0;
        u64 posted = 0;
    };

    std::shared_ptr<Inbox> inbox_of(u32 peer) const;
    bool fails(u32 peer) const;
    bool moves(const Flight& flight) const;
    void step(Flight& flight, Events& events);

    const NetworkPlace place_;
    const Random random_;
    const std::shared_ptr<Inbox> inbox_;
    std::vector<Link> links_;        // by peer
    mutable std::vector<bool> met_;  // by peer: its inbox has been there
    std::vector<Flight> flights_;
};

}  // namespace deep_ep::host::proxy
