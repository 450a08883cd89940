// The common part of launchers on a CUDA stream.
#pragma once

#include <string>
#include <string_view>

#include "host/cuda/driver.h"
#include "host/launch/launcher.h"

namespace deep_ep::host {

class StreamLauncher : public Launcher {
  public:
    // Loads a kernel compiled for a shape. Everything is loaded before the first launch of an operation, because
    // loading may wait for running kernels, and those may wait for this rank.
    virtual void load(const std::string& name, const RuntimeShape& shape, std::string_view cubin,
                      const std::string& symbol) = 0;
    virtual bool loaded(const std::string& name, const RuntimeShape& shape) const = 0;
    virtual cuda::Stream stream() const = 0;
    virtual void keep_stream() = 0;  // as KernelStream::keep
    // Throws the error of a failed kernel, or to end a wait. Called occasionally during waits.
    virtual void check() = 0;

    bool tracks_launches() const final { return false; }
    ChunkSizes chunks() const final { return kGpuChunks; }
    uint64_t streaming_threshold() const final { return UINT64_MAX; }  // applies only to caches of a CPU
    void wait(const std::function<bool()>& ready, const char* what) final;
    bool wait_for(const std::function<bool()>& ready, const char* what, uint64_t nanoseconds) final;
};

}  // namespace deep_ep::host
