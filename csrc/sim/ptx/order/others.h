// Notes the accesses of hosts, proxies and NICs in the Order that is watched.
#pragma once

#include "sim/ptx/order/order.h"

namespace deep_ep::ptx {

class Others final : public observe::Observer {
  public:
    void lock() override { order->mutex.lock(); }
    void unlock() override { order->mutex.unlock(); }
    u64 load_word(const observe::Accessor& by, const void* word, u32 bytes, u64 newest,
                  const observe::Accessor* behind) override;
    void look(const observe::Accessor& by, const void* word, u32 bytes) override;
    void store_word(const observe::Accessor& by, const void* word, u32 bytes, u64 before, u64 after,
                    bool updates) override;
    void read(const observe::Accessor& by, const void* memory, u64 bytes) override;
    void write(const observe::Accessor& by, const void* memory, u64 bytes) override;
    void tell_hosts(const observe::Accessor& by) override { order->other(by).release(order->told); }
    void hear_hosts(const observe::Accessor& by) override { order->other(by).clock.join(order->told); }
    void begin(const observe::Accessor& by) override { order->begin_other(by); }
    void end(const observe::Accessor& by) override { order->end_other(by); }

    std::shared_ptr<Order> order;

  private:
    void note(const observe::Accessor& by, const Actor& actor, const Made& access, bool writes);
};

// "the NIC of rank 1", "a thread of rank 0 at dispatch.h:120": the actor of an access.
std::string describe(const Made& made);

}  // namespace deep_ep::ptx
