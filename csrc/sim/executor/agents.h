// Agents model what surrounds the kernels (copy engines, NIC queue pairs, proxy threads) as daemon fibers.
#pragma once

#include <functional>
#include <string>

#include "sim/executor/fiber.h"
#include "sim/executor/stacks.h"

namespace deep_ep::cpu {

struct Agent {
    Agent(int id, int rank, std::string name, std::function<void()> body, void (*entry)());
    ~Agent();
    Agent(const Agent&) = delete;

    const int id;
    const int rank;
    const std::string name;
    const std::function<void()> body;
    bool stopping = false;  // its next wait throws AgentStopped
    bool done = false;
    Block block;
    Warp warp;
    Fiber fiber;
    tsan::SyncPoint added, ended;

  private:
    Stacks stacks_;
};

// Thrown through an agent's body to end it. Not a std::exception: a body that catches those must not swallow it.
struct AgentStopped {};

}  // namespace deep_ep::cpu
