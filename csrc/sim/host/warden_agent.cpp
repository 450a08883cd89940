#include "sim/host/warden_agent.h"

#include "device/device.h"
#include "sim/executor/executor.h"

namespace deep_ep::host {

WardenAgent::WardenAgent(WardenPost post, std::unique_ptr<Memory> memory, const MakeControl& make_control)
    : Warden(std::move(post), std::move(memory), make_control) {
    agent_ = cpu::Executor::get().add_agent(post.rank, "warden", [this] {
        for (;;) {
            cpu::wait_until([this] { return due(); }, "warden: a wait that times out");
            serve();
        }
    });
}

WardenAgent::~WardenAgent() { cpu::Executor::get().remove_agent(agent_); }

}  // namespace deep_ep::host
