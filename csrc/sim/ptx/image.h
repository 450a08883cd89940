// A loaded module: its variables have memory.
#pragma once

#include <memory>
#include <vector>

#include "sim/ptx/module.h"

namespace deep_ep::ptx {

class Image {
  public:
    explicit Image(Module module);

    const Module& module() const { return module_; }
    // The generic address of a variable; for one in shared memory, its offset in the block's shared memory.
    u64 address(u32 variable) const { return addresses_[variable]; }
    // Static shared memory per block. Dynamic shared memory follows it.
    u64 static_shared_bytes() const { return static_shared_bytes_; }

  private:
    const Module module_;
    std::vector<u64> addresses_;
    std::vector<u64> memory_;  // for all variables outside shared memory
    u64 static_shared_bytes_ = 0;
};

}  // namespace deep_ep::ptx
