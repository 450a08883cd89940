#include "sim/host/teller_agent.h"

#include "device/device.h"
#include "sim/executor/executor.h"

namespace deep_ep::host {

TellerAgent::TellerAgent(int rank, const uint64_t* claimed, Others others, std::unique_ptr<Memory> memory)
    : Teller(claimed, std::move(others), std::move(memory)) {
    agent_ = cpu::Executor::get().add_agent(rank, "teller", [this] {
        for (;;) {
            cpu::wait_until([this] { return due(); }, "teller: a failure");
            tell();
        }
    });
}

TellerAgent::~TellerAgent() { cpu::Executor::get().remove_agent(agent_); }

}  // namespace deep_ep::host
