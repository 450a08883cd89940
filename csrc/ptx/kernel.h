// Kernels of a loaded module as the executor launches them.
#pragma once

#include <memory>

#include "cpu/executor/executor.h"
#include "ptx/image.h"

namespace deep_ep::ptx {

// What a launch hands to its threads, before the kernel's own arguments.
struct LaunchHead {
    const Image* image;
    const Function* entry;
    u64 shared_bytes;  // of a block, static and dynamic
    u64 number;        // of the launch
    u32 rank, row;
};

// Whose GPU a launch is on; and where in a grid of several rows its blocks are, if it stands for one of them.
struct LaunchPlace {
    u32 rank, row;
};

// Makes a launch, whose arguments and dynamic shared memory are a kernel's, one of that kernel in a module. The image
// must outlive it. `held`: what launch.args points to.
void prepare(cpu::Launch& launch, std::string& held, const Image& image, const std::string& symbol,
             const LaunchPlace& place);

}  // namespace deep_ep::ptx
