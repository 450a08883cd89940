// The modules that the host library keeps supplied with its states.
#pragma once

#include <vector>

#include "golden.h"
#include "gpu.h"

namespace nvshmem_double {

class Modules {
  public:
    // Finds the module's symbols and checks them: the version that it was compiled for, and room for the states.
    void add(const Golden& golden, Gpu& gpu, void* module);
    void remove(void* module);
    // To each module; the state of IBGDA only where there is one. Throws Failure, once all that can be reached have
    // been, where a module was unloaded that is still registered.
    void copy(const Golden& golden, Gpu& gpu, const Bytes& device, const Bytes* ibgda) const;
    bool empty() const { return modules_.empty(); }

  private:
    std::vector<void*> modules_;
};

}  // namespace nvshmem_double
