// What the stand-in for the driver does with a launched kernel.
#pragma once

#include <cstdint>
#include <string>

#include "host/cuda/driver_types.h"

namespace driver_double {

// -> a number for ended(). `stream`: launches on one run one after the other.
uint64_t run(const std::string& symbol, const deep_ep::host::cuda::LaunchConfig& config, const void* args);
bool ended(uint64_t serial);

}  // namespace driver_double
