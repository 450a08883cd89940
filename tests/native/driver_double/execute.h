// What the stand-in for the driver does with a launched kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "host/cuda/driver_types.h"

namespace driver_double {

// -> a number for ended(). Launches in one queue run one after the other. `args`: the kernel's; an array of them by
// rank where it is launched for several ranks at once.
uint64_t run(const std::string& symbol, const deep_ep::host::cuda::LaunchConfig& config, int queue, const void* args);
bool ended(uint64_t serial);
// Of the kernel's arguments; 0: not known.
size_t argument_bytes(const std::string& symbol);
inline bool for_ranks(const std::string& symbol) { return symbol.find("of_each_rank") != std::string::npos; }
// Host memory that kernels use too: they keep to accesses at system scope there.
void share(const void* memory, size_t bytes);
void unshare(const void* memory);

}  // namespace driver_double
