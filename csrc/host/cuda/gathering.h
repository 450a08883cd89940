// Gathers the launches of ranks that are threads of this process: the GPU gets a single launch with the blocks of all
// ranks instead of one launch per rank. For tools that do not let two launches run concurrently, as compute-sanitizer
// may: ranks with separate launches would wait for each other forever.
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

// Some rank did not come to a launch, or came with a different one.
class GatheringError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The state that the ranks share. Each rank comes to every launch with the same kernel, shape, blocks, and shared
// memory: a grid has one size, and otherwise the kernels would have to turn away blocks without work. Any thread may
// call.
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

    // Returns when all ranks have come and their launch is queued, with a serial number that is the same for all. If
    // the launch fails, throws its error in all ranks; throws GatheringError, also at later calls, if some rank does
    // not come within `timeout_ns`.
    uint64_t launch(unsigned rank, Part part, uint64_t timeout_ns);
    // This rank will not come again: the ranks that wait for it are notified.
    void leave(unsigned rank);

    // A kernel loaded by the first rank serves all.
    void load(const std::string& name, const RuntimeShape& shape, std::string_view cubin, const std::string& symbol);
    bool loaded(const std::string& name, const RuntimeShape& shape);
    bool finished(uint64_t serial);
    void check();
    bool wait_for_device(uint64_t nanoseconds) { return launcher_.wait_for_device(nanoseconds); }
    cuda::Stream stream() const { return launcher_.stream(); }
    void keep_stream();
    unsigned ranks() const { return ranks_; }
    unsigned warps() const { return launcher_.warps(); }
    uint32_t copies_bytes() const { return launcher_.copies_bytes(); }
    size_t max_shared_bytes() const { return launcher_.max_shared_bytes(); }

  private:
    // One launch, from the arrival of the first rank.
    struct Round {
        std::vector<std::optional<Part>> parts;
        unsigned arrived = 0;
        bool over = false;
        uint64_t serial = 0;
        std::exception_ptr failure;
    };
    // The arguments of all ranks, read by kernels.
    struct Array {
        size_t bytes;
        std::shared_ptr<void> memory;
        uint64_t serial;  // of the last launch that reads it
    };

    bool hopeless(const Round& round) const;
    void launch_all(Round& round);
    Array& take_array(size_t bytes);
    void wait(std::unique_lock<std::mutex>& lock, Round& round, uint64_t timeout_ns);
    // `missing`: the text for a rank that might still have come.
    void break_off(Round& round, const std::string& missing);
    std::string who_came(const Round& round, const std::string& missing) const;

    const unsigned ranks_;
    std::mutex mutex_;  // guards the members below
    std::condition_variable over_;
    CudaLauncher launcher_;
    CudaMemory memory_;
    std::deque<Array> arrays_;
    std::shared_ptr<Round> round_;  // the current one
    std::vector<bool> left_;
    std::exception_ptr broken_;
};

// The launcher of one rank of a Gathering.
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
    void keep_stream() override { gathering_->keep_stream(); }
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
