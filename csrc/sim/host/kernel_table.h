// The kernels, compiled for the CPU, by name.
#pragma once

#include "sim/executor/executor.h"

namespace deep_ep::host {

// Throws std::out_of_range for an unknown name.
cpu::Entry find_kernel(const char* name);

}  // namespace deep_ep::host
