// A transport between ranks of one process, for tests. It behaves as badly as a network may: messages are late and
// overtake each other, their bytes are read from the source and placed in pieces up to the last moment, an immediate
// arrives before or after the sender's completion, and occasionally twice; a link may fail, or silently accept nothing.
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
    // The immediates that peers have sent to a rank, in one generation: they tell generations apart only modulo 4.
    struct Inbox {
        const u32 generation;
        std::mutex mutex{};
        std::deque<u32> immediates{};
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
    mutable std::vector<bool> met_;  // by peer: whether its inbox has existed
    std::vector<Flight> flights_;
};

}  // namespace deep_ep::host::proxy
