// What the stand-in for the driver does with a launched kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "host/cuda/driver_types.h"

namespace driver_double {

// -> a number for ended(). `stream`: launches on one run one after the other.
uint64_t run(const std::string& symbol, const deep_ep::host::cuda::LaunchConfig& config, const void* args);
bool ended(uint64_t serial);
// The kernel's arguments, which do not live longer than its launch.
std::string copy_of_args(const std::string& symbol, const void* args);
// Host memory that kernels use too: they keep to accesses at system scope there.
void share(const void* memory, size_t bytes);
void unshare(const void* memory);

}  // namespace driver_double
