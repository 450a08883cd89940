// Gathers the launches of ranks that are threads of this process: the GPU gets one, of all ranks' blocks, where they
// would make one each. For tools that let no two launches run side by side, as compute-sanitizer may: ranks that launch
// for themselves would wait for each other forever.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/cuda/launcher.h"
#include "host/cuda/memory.h"

namespace deep_ep::host {

// Some rank did not come to a launch, or came with another one.
class GatheringError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// What the ranks share. Each comes to every launch with the same kernel, shape, blocks and shared memory: a grid has
// one size, and blocks without work would have to be refused in the kernels. Any thread may call.
class Gathering {
  public:
    struct Part {
        std::string kernel;
        RuntimeShape shape;
        unsigned blocks, warps;
        size_t shared_bytes;
        std::string args;
    };

    Gathering(const std::shared_ptr<const cuda::PrimaryContext>& context, unsigned ranks, unsigned warps,
              uint32_t copies_bytes, bool cooperative);

    // Returns when all ranks have come and their launch is queued: its serial number, the same for all. Throws in all
    // of them what that failed of; GatheringError, also at later calls, if some rank does not come within `timeout_ns`.
    uint64_t launch(unsigned rank, Part part, uint64_t timeout_ns);
    // This rank will not come again: the ranks that wait for it are told so.
    void leave(unsigned rank);

    // What the first rank loads serves all.
    void load(const std::string& name, const RuntimeShape& shape, std::string_view cubin, const std::string& symbol);
    bool loaded(const std::string& name, const RuntimeShape& shape);
    bool finished(uint64_t serial);
    void check();
    bool wait_for_device(uint64_t nanoseconds) { return launcher_.wait_for_device(nanoseconds); }
    cuda::Stream stream() const { return launcher_.stream(); }
    unsigned ranks() const { return ranks_; }
    unsigned warps() const { return launcher_.warps(); }
    uint32_t copies_bytes() const { return launcher_.copies_bytes(); }
    size_t max_shared_bytes() const { return launcher_.max_shared_bytes(); }

  private:
    // One launch, from the first rank's arrival on.
    struct Round {
        std::vector<std::optional<Part>> parts;
        unsigned arrived = 0;
        bool over = false;
        uint64_t serial = 0;
        std::exception_ptr failure;
    };
    // Arguments of all ranks, which kernels read.
    struct Array {
        size_t bytes;
        std::shared_ptr<void> memory;
        uint64_t serial;  // of the last launch that reads it
    };

    bool hopeless(const Round& round) const;
    void launch_all(Round& round);
    Array& take_array(size_t bytes);
    void wait(std::unique_lock<std::mutex>& lock, Round& round, uint64_t timeout_ns);
    // `missing`: what is said of a rank that may still come.
    void break_off(Round& round, const std::string& missing);
    std::string who_came(const Round& round, const std::string& missing) const;

    const unsigned ranks_;
    std::mutex mutex_;  // guards all that follows
    std::condition_variable over_;
    CudaLauncher launcher_;
    CudaMemory memory_;
    std::deque<Array> arrays_;
    std::shared_ptr<Round> round_;  // that ranks come to now
    std::vector<bool> left_;
    std::exception_ptr broken_;
};

// One rank's way to it.
class GatheredLauncher final : public StreamLauncher {
  public:
    // `timeout_ns`: how long this rank waits for the others.
    GatheredLauncher(std::shared_ptr<Gathering> gathering, unsigned rank, uint64_t timeout_ns);

    void load(const std::string& name, const RuntimeShape& shape, std::string_view cubin,
              const std::string& symbol) override;
    bool loaded(const std::string& name, const RuntimeShape& shape) const override;
    uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps, size_t shared_bytes,
                    const void* args, size_t args_bytes) override;
    bool finished(uint64_t serial) const override { return gathering_->finished(serial); }
    cuda::Stream stream() const override { return gathering_->stream(); }
    unsigned warps() const override { return gathering_->warps(); }
    uint32_t copies_bytes() const override { return gathering_->copies_bytes(); }
    size_t max_shared_bytes() const override { return gathering_->max_shared_bytes(); }
    void check() override { gathering_->check(); }
    bool wait_for_device(uint64_t nanoseconds) override { return gathering_->wait_for_device(nanoseconds); }

  private:
    const std::shared_ptr<Gathering> gathering_;
    const unsigned rank_;
    const uint64_t timeout_ns_;
};

}  // namespace deep_ep::host
