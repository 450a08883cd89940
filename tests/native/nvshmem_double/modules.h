// The modules to which the host library copies its states.
#pragma once

#include <vector>

#include "golden.h"
#include "gpu.h"

namespace nvshmem_double {

class Modules {
  public:
    // Finds and checks the module's symbols: the version that it was compiled for, and room for the states.
    void add(const Golden& golden, Gpu& gpu, void* module);
    void remove(void* module);
    // Copies to each module; the state of IBGDA only if there is one. Throws Failure if a registered module was
    // unloaded, after copying to all others.
    void copy(const Golden& golden, Gpu& gpu, const Bytes& device, const Bytes* ibgda) const;
    bool empty() const { return modules_.empty(); }

  private:
    std::vector<void*> modules_;
};

}  // namespace nvshmem_double
