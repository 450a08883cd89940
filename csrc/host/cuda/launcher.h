// Launches kernels on one stream of a GPU, each rank for itself.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "host/cuda/stream_launcher.h"

namespace deep_ep::host {

class CudaLauncher final : public StreamLauncher {
  public:
    // `sharers`: ranks whose kernels are on this GPU at the same time, each with its share of it. `interrupt_check` may
    // throw, to end a wait. `copies_bytes`: Launcher's.
    // `cooperative`: the driver, too, is told that all blocks of a launch must be resident at once. They are even if
    // it is not told, by the arithmetic of max_blocks(), unless kernels that are not this library's take their room;
    // and nothing documents that two cooperative launches run side by side.
    CudaLauncher(std::shared_ptr<const cuda::PrimaryContext> context, unsigned sharers, unsigned warps,
                 uint32_t copies_bytes, bool cooperative, std::function<void()> interrupt_check);
    // Kernels that still run keep stream and code until they have ended: the driver ensures this.
    ~CudaLauncher() override;
    CudaLauncher(const CudaLauncher&) = delete;
    CudaLauncher& operator=(const CudaLauncher&) = delete;

    // All that the driver would else do at the first launch it does now: then it may take locks, and wait for kernels
    // that run, which may wait for this one.
    void load(const std::string& name, const RuntimeShape& shape, std::string_view cubin,
              const std::string& symbol) override;
    bool loaded(const std::string& name, const RuntimeShape& shape) const override;
    // Blocks of a loaded kernel that this rank's share of the GPU can hold at once.
    unsigned max_blocks(const std::string& name, const RuntimeShape& shape, unsigned warps, size_t shared_bytes);

    // All blocks are resident at once, or nothing is launched (CudaError): blocks wait for each other.
    // Where the stream is being captured it becomes part of that graph, and its serial number is 0.
    uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps, size_t shared_bytes,
                    const void* args, size_t args_bytes) override;
    // The same for `ranks` ranks at once, each with `blocks` blocks. The kernel is a device::of_each_rank; `args`,
    // which the GPU can read, holds each rank's until the launch has ended.
    uint64_t launch_for_ranks(const std::string& name, const RuntimeShape& shape, unsigned blocks, unsigned ranks,
                              unsigned warps, size_t shared_bytes, const void* args);
    bool capturing() const;  // whether what is launched now goes into a graph
    bool finished(uint64_t serial) const override;
    GraphGone watch_graph() override;
    cuda::Stream stream() const override { return stream_; }
    unsigned warps() const override { return warps_; }
    uint32_t copies_bytes() const override { return copies_bytes_; }
    size_t max_shared_bytes() const override;
    void check() override;
    bool wait_for_device(uint64_t nanoseconds) override {
        return cuda::PrimaryContext::synchronize(context_, nanoseconds);
    }

  private:
    struct Kernel {
        cuda::Module module;
        cuda::Function function;
        size_t shared_allowed = 0;  // bytes of dynamic shared memory, as the driver has been told
        // The last launch's, and what the driver said of it.
        unsigned warps = 0;
        size_t shared_bytes = 0;
        unsigned max_blocks = 0;
    };
    struct Running {
        uint64_t serial;
        std::string what;
        cuda::Event ended;
    };

    using Key = std::tuple<std::string, uint32_t, uint32_t, uint32_t>;
    static Key key(const std::string& name, const RuntimeShape& shape) {
        return {name, shape.ranks_, shape.row_bytes_, shape.topk_};
    }
    void make_resident(Kernel& kernel, const std::string& name);
    void make_events();
    Kernel& find(const std::string& name, const RuntimeShape& shape);
    unsigned max_blocks(Kernel& kernel, const std::string& name, unsigned warps, size_t shared_bytes);
    // `parameter`: points to the one that the kernel takes.
    uint64_t launch_grid(const std::string& name, const RuntimeShape& shape, unsigned blocks, unsigned ranks,
                         unsigned warps, size_t shared_bytes, const void* parameter);
    bool captured() const;  // the same as capturing(), where the context is current
    cuda::Event take_event();
    // Forgets the launches that have ended; throws what a kernel has failed of.
    void collect() const;

    const std::shared_ptr<const cuda::PrimaryContext> context_;
    const unsigned sharers_;
    const unsigned warps_;
    const uint32_t copies_bytes_;
    const bool cooperative_;
    const std::function<void()> interrupt_check_;
    cuda::Stream stream_ = nullptr;
    std::map<Key, Kernel> kernels_;
    uint64_t latest_ = 0;
    // In the order of the stream; `finished` looks at the front.
    mutable std::deque<Running> running_;
    mutable std::vector<cuda::Event> spare_events_;
};

}  // namespace deep_ep::host
