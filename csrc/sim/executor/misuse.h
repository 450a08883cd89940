// Reports rules that a kernel has broken, and names threads in messages.
#pragma once

#include <string>

#include "sim/executor/fiber.h"

namespace deep_ep::cpu {

// Ends everything with a SimtError that names the rule, the line and the calling thread. Called on fibers, whose stacks
// are not unwound in this case; therefore it takes no std::string, which would leak.
[[noreturn, gnu::format(printf, 2, 3)]] void misuse(Site site, const char* rule, ...);

std::string to_string(Site site);
std::string describe(const Fiber& fiber);  // "rank 1, dispatch, block 0, thread 37"

}  // namespace deep_ep::cpu
