#include "host/network/proxy/thread.h"
#include "sim/network/proxy/agent.h"

namespace deep_ep::host::proxy {
namespace {

std::unique_ptr<Network> make(const NetworkPlace& place) {
    // In this case the executor schedules everything.
    if (place.kernels_on_cpu && place.in_process) return std::make_unique<Agent>(place);
    return std::make_unique<Thread>(place);
}
[[maybe_unused]] const MakeNetwork made_known = make_network<fabric::Proxy> = make;

}  // namespace
}  // namespace deep_ep::host::proxy
