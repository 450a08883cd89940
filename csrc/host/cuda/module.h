// A module that is loaded only for its symbols: another library fills them in, and the host reads them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "host/cuda/driver.h"

namespace deep_ep::host::cuda {

class LoadedModule {
  public:
    // `image`: a cubin.
    LoadedModule(std::shared_ptr<const PrimaryContext> context, const std::string& image);
    ~LoadedModule();
    LoadedModule(const LoadedModule&) = delete;
    LoadedModule& operator=(const LoadedModule&) = delete;

    // The handle for the driver and for libraries built on it.
    Module handle() const { return module_; }
    // Returns the contents of a symbol.
    std::vector<uint8_t> read(const std::string& symbol) const;

  private:
    const std::shared_ptr<const PrimaryContext> context_;
    Module module_ = nullptr;
};

}  // namespace deep_ep::host::cuda
