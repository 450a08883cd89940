#include <sched.h>

#include "host/network/proxy/libfabric.h"
#include "host/network/proxy/measure/command_writer.h"
#include "host/network/proxy/measure/puts.h"
#include "host/network/proxy/progress.h"
#include "host/network/proxy/thread.h"
#include "observe/clock.h"

namespace deep_ep::host::proxy {
namespace {

// A proxy that the waiting thread steps.
class Stepped {
  public:
    explicit Stepped(const NetworkPlace& place) : progress_(place, make_libfabric(place), {observe::monotonic_ns, 0}) {}
    void* state() { return progress_.state(); }
    void step() { progress_.step(); }

  private:
    Progress progress_;
};

class Threaded {
  public:
    explicit Threaded(const NetworkPlace& place) : thread_(place, make_libfabric(place)) {}
    void* state() { return thread_.state(); }
    void step() { sched_yield(); }

  private:
    Thread thread_;
};

template <class Proxy>
class ProxyPuts final : public Puts {
  public:
    explicit ProxyPuts(const NetworkPlace& place)
        : peer_(1 - static_cast<u32>(place.rank)),
          word_(measured_word(place, peer_)),
          proxy_(place),
          commands_(proxy_.state()) {}

    std::string name() const override { return "the proxy"; }
    bool post(u64 source, u64 target, u64 bytes) override {
        return commands_.put(peer_, kMeasuredWord, source, target, bytes);
    }
    void step() override { proxy_.step(); }
    u64 completed() const override { return commands_.retired(); }
    u64 arrived() const override { return puts_in_word(word_); }

  private:
    const u32 peer_;
    const u64* const word_;
    Proxy proxy_;
    CommandWriter commands_;
};

}  // namespace

std::unique_ptr<Puts> make_proxy_puts(const NetworkPlace& place, bool threaded) {
    if (threaded) return std::make_unique<ProxyPuts<Threaded>>(place);
    return std::make_unique<ProxyPuts<Stepped>>(place);
}

}  // namespace deep_ep::host::proxy
