// Where the launcher finds what a kernel's threads run.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/executor/executor.h"
#include "host/launch/launcher.h"

namespace deep_ep::host {

class KernelSource {
  public:
    virtual ~KernelSource() = default;
    // Fills in what a launch of launch.name runs, launch.args being the kernel's own arguments until then. `held`:
    // keeps what it comes to point to. Throws std::out_of_range for a name that is none.
    virtual void find(cpu::Launch& launch, const RuntimeShape& shape, std::string& held) const = 0;
    // As Launcher has it.
    virtual uint32_t copies_bytes() const = 0;
    virtual unsigned warps() const = 0;
};

// The kernels as they are compiled into this extension.
class CompiledKernels final : public KernelSource {
  public:
    void find(cpu::Launch& launch, const RuntimeShape& shape, std::string& held) const override;
    uint32_t copies_bytes() const override;
    unsigned warps() const override { return 4; }
};

}  // namespace deep_ep::host
