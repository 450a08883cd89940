#include "host/network/ibgda/adopted_nic.h"
#include "sim/nic/network/nic_agents.h"
#include "sim/nic/network/nic_thread.h"

namespace deep_ep::host {
namespace {

std::unique_ptr<Network> make(const NetworkPlace& place) {
    if (place.make_queue_pairs) return std::make_unique<AdoptedNic>(place);
    // In this case the executor schedules everything.
    if (place.kernels_on_cpu && place.in_process) return std::make_unique<NicAgents>(place);
    return std::make_unique<NicThread>(place);
}
[[maybe_unused]] const MakeNetwork made_known = make_network<fabric::Ibgda> = make;

}  // namespace
}  // namespace deep_ep::host
