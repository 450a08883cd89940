#include "sim/executor/agents.h"

#include <utility>

namespace deep_ep::cpu {

Agent::Agent(int id, int rank, std::string name, std::function<void()> body, void (*entry)())
    : id(id), rank(rank), name(std::move(name)), body(std::move(body)) {
    stacks_.reserve(1);
    warp.live = 1;
    warp.lanes[0] = &fiber;
    fiber.block = &block;
    fiber.warp = &warp;
    fiber.agent = this;
    fiber.stack_low = stacks_.low(0);
    fiber.stack_size = stacks_.size(0);
    fiber.tsan_fiber = tsan::create_fiber();
    context_init(fiber.context, fiber.stack_low, fiber.stack_size, entry);
    tsan::as(tsan::host_fiber, [&] { added.open(); });
}

Agent::~Agent() {
    stacks_.forget();
    tsan::destroy_fiber(fiber.tsan_fiber);
}

}  // namespace deep_ep::cpu
