// A module that is loaded: its variables have memory.
#pragma once

#include <memory>
#include <vector>

#include "ptx/module.h"

namespace deep_ep::ptx {

class Image {
  public:
    explicit Image(Module module);

    const Module& module() const { return module_; }
    // Of a variable: its generic address; of one in shared memory its place in a block's.
    u64 address(u32 variable) const { return addresses_[variable]; }
    // Of a block's shared memory, those of the module; dynamic shared memory comes behind.
    u64 static_shared_bytes() const { return static_shared_bytes_; }

  private:
    const Module module_;
    std::vector<u64> addresses_;
    std::vector<u64> memory_;  // of all variables but the shared ones
    u64 static_shared_bytes_ = 0;
};

}  // namespace deep_ep::ptx
