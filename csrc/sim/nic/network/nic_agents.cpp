#include "sim/nic/network/nic_agents.h"

#include "device/device.h"
#include "sim/executor/executor.h"

namespace deep_ep::host {

NicAgents::Agent::~Agent() { cpu::Executor::get().remove_agent(id); }

// Random numbers and time come from the executor's world, so that a seed determines everything.
NicAgents::NicAgents(const NetworkPlace& place)
    : NicQueuePairs(
          place, [](u32 bound) { return static_cast<u32>(cpu::Executor::get().random() % bound); },
          [] { return cpu::Executor::get().now_ns(); }) {
    for (nic::SendQueue* queue : served()) {
        const std::string name = "queue pair to rank " + std::to_string(queue->connection().peer);
        const int agent = cpu::Executor::get().add_agent(place.rank, name, [this, queue] { serve(*queue); });
        agents_.push_back(std::make_unique<Agent>(agent));
    }
}

void NicAgents::serve(nic::SendQueue& queue) {
    cpu::Executor& executor = cpu::Executor::get();
    const u32 most = options().max_delay;
    for (;;) {
        cpu::wait_until([&] { return queue.has_work(); }, "NIC: a doorbell");
        for (u64 delay = most != 0 ? executor.random() % most : 0; delay != 0; --delay) cpu::yield();
        queue.step();
    }
}

}  // namespace deep_ep::host
