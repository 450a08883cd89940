// Rules that a kernel broke, and how its threads are named in messages.
#pragma once

#include <string>

#include "cpu/executor/fiber.h"

namespace deep_ep::cpu {

// Ends everything with a SimtError that names the rule, the line and the calling thread. For fibers.
[[noreturn]] void misuse(const std::string& message, Site site);

std::string to_string(Site site);
std::string describe(const Fiber& fiber);  // "rank 1, dispatch, block 0, thread 37"

}  // namespace deep_ep::cpu
