// What launchers on a stream of a GPU have in common.
#pragma once

#include <string>
#include <string_view>

#include "host/cuda/driver.h"
#include "host/launch/launcher.h"

namespace deep_ep::host {

class StreamLauncher : public Launcher {
  public:
    // Takes a kernel compiled for a shape. Everything is loaded before the first launch of an operation: loading may
    // wait for kernels that run, and those for this rank.
    virtual void load(const std::string& name, const RuntimeShape& shape, std::string_view cubin,
                      const std::string& symbol) = 0;
    virtual bool loaded(const std::string& name, const RuntimeShape& shape) const = 0;
    virtual cuda::Stream stream() const = 0;
    // Throws what a kernel has failed of, or to end a wait, during which it is called now and then.
    virtual void check() = 0;

    uint64_t streaming_threshold() const final { return UINT64_MAX; }  // for a CPU's caches
    void wait(const std::function<bool()>& ready, const char* what) final;
    bool wait_for(const std::function<bool()>& ready, const char* what, uint64_t nanoseconds) final;
};

}  // namespace deep_ep::host
