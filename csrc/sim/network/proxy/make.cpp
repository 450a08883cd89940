#include <random>

#include "host/network/proxy/libfabric.h"
#include "host/network/proxy/thread.h"
#include "sim/executor/executor.h"
#include "sim/network/proxy/agent.h"
#include "sim/network/proxy/loopback.h"

namespace deep_ep::host::proxy {
namespace {

// The thread that runs the kernels of a rank also steps its proxy, between their turns.
class HelpedThread final : public Thread {
  public:
    using Thread::Thread;
    ~HelpedThread() override { cpu::Executor::get().remove_helper(helper_); }

  private:
    const int helper_ = cpu::Executor::get().add_helper({[this] { return help(); }});
};

// Ranks that are threads of one process need no network library to reach each other.
std::unique_ptr<Transport> transport_of(const NetworkPlace& place) {
    if (!place.in_process) return make_libfabric(place);
    const auto random = std::make_shared<std::mt19937>(static_cast<u32>(place.rank));
    return std::make_unique<Loopback>(place, [random](u32 bound) { return static_cast<u32>((*random)() % bound); });
}

std::unique_ptr<Network> make(const NetworkPlace& place) {
    // In this case the executor schedules everything.
    if (place.kernels_on_cpu && place.in_process) return std::make_unique<Agent>(place);
    if (place.kernels_on_cpu) return std::make_unique<HelpedThread>(place, transport_of(place));
    return std::make_unique<Thread>(place, transport_of(place));
}
[[maybe_unused]] const MakeNetwork made_known = make_network<fabric::Proxy> = make;

}  // namespace
}  // namespace deep_ep::host::proxy
