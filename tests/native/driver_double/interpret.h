// PTX modules, and launches of their kernels.
#pragma once

#include "execute.h"
#include "sim/executor/executor.h"

namespace driver_double {

// Turns a launch into one of that kernel, for a rank, with blocks in a row of the grid. `held`: storage for
// launch.args.
void interpret(const Program& program, const std::string& symbol, int rank, unsigned row, deep_ep::cpu::Launch& launch,
               std::string& held);

}  // namespace driver_double
