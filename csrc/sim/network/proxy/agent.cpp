#include "sim/network/proxy/agent.h"

#include "device/device.h"
#include "sim/executor/executor.h"
#include "sim/network/proxy/loopback.h"

namespace deep_ep::host::proxy {
namespace {

std::unique_ptr<Transport> loopback(const NetworkPlace& place) {
    return std::make_unique<Loopback>(
        place, [](u32 bound) { return static_cast<u32>(cpu::Executor::get().random() % bound); });
}

}  // namespace

Agent::Agent(const NetworkPlace& place)
    : ProxyNetwork(place, loopback(place), {[] { return cpu::Executor::get().now_ns(); }, 0}),
      max_delay_(place.nic.max_delay) {
    agent_ = cpu::Executor::get().add_agent(place.rank, "proxy", [this] { serve(); });
}

Agent::~Agent() { cpu::Executor::get().remove_agent(agent_); }

void Agent::serve() {
    cpu::Executor& executor = cpu::Executor::get();
    for (;;) {
        cpu::wait_until([this] { return progress_.has_work(); }, "proxy: a command, or a message");
        for (u64 delay = max_delay_ != 0 ? executor.random() % max_delay_ : 0; delay != 0; --delay) cpu::yield();
        progress_.step();
    }
}

}  // namespace deep_ep::host::proxy
