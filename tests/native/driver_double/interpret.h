// Modules of PTX, and launches of their kernels.
#pragma once

#include "cpu/executor/executor.h"
#include "execute.h"

namespace driver_double {

// Makes a launch one of that kernel, as a rank's, by blocks in a row of the grid. `held`: what launch.args points to.
void interpret(const Program& program, const std::string& symbol, int rank, unsigned row, deep_ep::cpu::Launch& launch,
               std::string& held);

}  // namespace driver_double
