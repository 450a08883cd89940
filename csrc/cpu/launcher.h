// Launches kernels on the executor.
#pragma once

#include "host/launcher.h"

namespace deep_ep::cpu {

class CpuLauncher final : public host::Launcher {
  public:
    // Each launcher is a stream of its own.
    explicit CpuLauncher(int rank);

    uint64_t launch(const char* kernel, unsigned blocks, unsigned warps, size_t shared_bytes, const void* args, size_t args_bytes) override;
    bool finished(uint64_t serial) const override;
    void wait(const std::function<bool()>& ready, const char* what) override;

  private:
    const int rank_;
    const int stream_;
};

}  // namespace deep_ep::cpu
