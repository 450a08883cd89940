// Launches kernels of a loaded module on the executor.
#pragma once

#include <memory>

#include "sim/executor/executor.h"
#include "sim/ptx/image.h"

namespace deep_ep::ptx {

// Precedes the kernel's own arguments in what a launch passes to its threads.
struct LaunchHead {
    const Image* image;
    const Function* entry;
    u64 shared_bytes;  // per block, static and dynamic
    u64 number;        // number of the launch
    u32 rank, row;
    double not_before;  // while kernels are counted: the time at which it was launched
};

// The rank whose GPU a launch runs on, and the row of the grid that it stands for (blockIdx.y).
struct LaunchPlace {
    u32 rank, row;
};

// Turns a launch that already has a kernel's arguments and dynamic shared memory into a launch of that kernel of a
// module. The image must outlive it. `held` receives the memory that launch.args points to.
void prepare(cpu::Launch& launch, std::string& held, const Image& image, const std::string& symbol,
             const LaunchPlace& place);

}  // namespace deep_ep::ptx
