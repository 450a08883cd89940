// Launches kernels on the executor.
#pragma once

#include "host/launch/launcher.h"
#include "sim/executor/executor.h"
#include "sim/host/kernel_source.h"

namespace deep_ep::host {

class CpuLauncher final : public Launcher {
  public:
    // Each launcher has its own stream. `words`: memory of this rank that other ranks' kernels and the host poll and
    // add to, so that every access needs system scope.
    CpuLauncher(int rank, const void* words, size_t bytes,
                std::shared_ptr<const KernelSource> kernels = std::make_shared<CompiledKernels>());
    ~CpuLauncher() override;

    // The stream in which its launches are queued, possibly interleaved with others.
    int stream() const { return stream_; }

    uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps, size_t shared_bytes,
                    const void* args, size_t args_bytes) override;
    bool finished(uint64_t serial) const override;
    bool tracks_launches() const override { return true; }
    unsigned warps() const override { return kernels_->warps(); }
    uint32_t copies_bytes() const override;
    size_t max_shared_bytes() const override { return cpu::kMaxSharedBytes; }
    ChunkSizes chunks() const override { return kernels_->chunks(); }
    uint64_t streaming_threshold() const override;
    void wait(const std::function<bool()>& ready, const char* what) override;
    bool wait_for(const std::function<bool()>& ready, const char* what, uint64_t nanoseconds) override;
    bool wait_for_device(uint64_t) override { return true; }  // nothing but launches, which are waited for elsewhere

  private:
    // Adds a wait of the host to a timeline that is being recorded.
    void record(uint64_t begin, const char* what) const;

    const int rank_;
    const int stream_;
    const void* const words_;
    const std::shared_ptr<const KernelSource> kernels_;
};

}  // namespace deep_ep::host
