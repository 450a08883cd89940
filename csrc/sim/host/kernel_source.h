// The source of the code that the threads of a kernel run.
#pragma once

#include <cstdint>
#include <string>

#include "host/launch/launcher.h"
#include "sim/executor/executor.h"

namespace deep_ep::host {

class KernelSource {
  public:
    virtual ~KernelSource() = default;
    // Fills in the code for a launch of launch.name. On entry, launch.args points to the kernel's own arguments. `held`
    // owns any data that the launch points to on return. Throws std::out_of_range for an unknown name.
    virtual void find(cpu::Launch& launch, const RuntimeShape& shape, std::string& held) const = 0;
    // As in Launcher.
    virtual uint32_t copies_bytes() const = 0;
    virtual unsigned warps() const = 0;
    virtual ChunkSizes chunks() const = 0;
};

// The kernels compiled into this extension.
class CompiledKernels final : public KernelSource {
  public:
    void find(cpu::Launch& launch, const RuntimeShape& shape, std::string& held) const override;
    uint32_t copies_bytes() const override;
    unsigned warps() const override { return 4; }
    ChunkSizes chunks() const override { return kCpuChunks; }
};

}  // namespace deep_ep::host
