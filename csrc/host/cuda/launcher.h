// Launches kernels on CUDA streams, separately for each rank.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "host/cuda/kernel_stream.h"
#include "host/cuda/stream_launcher.h"

namespace deep_ep::host {

class CudaLauncher final : public StreamLauncher {
  public:
    // `sharers`: the number of ranks whose kernels run on this GPU at the same time, each with its share of it.
    // `interrupt_check` may throw, to end a wait. `copies_bytes`: as in Launcher.
    // `cooperative`: also tells the driver that all blocks of a launch must be resident at once. max_blocks() ensures
    // this even without telling it, unless kernels from outside this library take up their room. Nothing documents that
    // two cooperative launches run concurrently.
    CudaLauncher(std::shared_ptr<const cuda::PrimaryContext> context, unsigned sharers, unsigned warps,
                 uint32_t copies_bytes, bool cooperative, std::function<void()> interrupt_check);
    // The driver keeps stream and code until kernels that are still running have ended.
    ~CudaLauncher() override;
    CudaLauncher(const CudaLauncher&) = delete;
    CudaLauncher& operator=(const CudaLauncher&) = delete;

    // Changes the number of sharers, before any kernel is loaded.
    void share(unsigned sharers) { sharers_ = sharers; }
    // Makes the driver do now what it would otherwise do at the first launch: it may take locks and wait for running
    // kernels, which may wait for this one.
    void load(const std::string& name, const RuntimeShape& shape, std::string_view cubin,
              const std::string& symbol) override;
    bool loaded(const std::string& name, const RuntimeShape& shape) const override;
    // The number of blocks of a loaded kernel that this rank's share of the GPU can hold at once.
    unsigned max_blocks(const std::string& name, const RuntimeShape& shape, unsigned warps, size_t shared_bytes);

    // All blocks are resident at once, since they wait for each other; otherwise nothing is launched (CudaError).
    // If the stream is being captured, the launch becomes part of that graph, and its serial number is 0.
    uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps, size_t shared_bytes,
                    const void* args, size_t args_bytes) override;
    // The same for `ranks` ranks at once, each with `blocks` blocks. The kernel is a device::of_each_rank. `args`,
    // which the GPU must be able to read, holds the arguments of all ranks until the launch has ended.
    uint64_t launch_for_ranks(const std::string& name, const RuntimeShape& shape, unsigned blocks, unsigned ranks,
                              unsigned warps, size_t shared_bytes, const void* args);
    bool capturing() const override;
    // From now on, an event is recorded right before and right after every launch that no graph captures, or no longer.
    // Makes events for some launches: a launch should allocate nothing.
    void time_launches(bool timed);
    struct LaunchTime {
        std::string kernel;
        double begin_ms;  // both since the begin of the first one
        double end_ms;
    };
    // Waits for the timed launches since the last call, and returns their times in order.
    std::vector<LaunchTime> take_launch_times();
    // Whether nothing runs on this launcher's own stream. Throws the error of a kernel that has failed.
    bool finished(uint64_t serial) const override;
    GraphGone watch_graph() override;
    // The stream of the launches that follow; none: the own one, as at first. Kernels run in the order of their
    // launches on whichever streams (P1): until a second stream is used, that stream keeps the order; from then on, an
    // event behind each launch does. `ends`: the stream may be destroyed before the next launch, and its handle given
    // to another.
    void launch_on(std::optional<cuda::Stream> stream, bool ends) {
        next_ = stream;
        ends_ = ends;
    }
    cuda::Stream stream() const override { return stream_->get(); }  // the own one
    void keep_stream() override { stream_->keep(); }
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
        size_t shared_allowed = 0;  // bytes of dynamic shared memory allowed to the driver
        // Those of the last launch, and the driver's answer for it.
        unsigned warps = 0;
        size_t shared_bytes = 0;
        unsigned max_blocks = 0;
    };
    // The latest launch, behind which the next one on another stream is ordered.
    struct Latest {
        std::optional<cuda::Stream> stream;
        bool recorded = false;           // the event is behind the launch
        bool ends = false;               // by now the handle may stand for another stream
        unsigned long long capture = 0;  // of the graph that it is part of; 0: none
        cuda::Event behind = nullptr;
    };

    struct Timed {
        std::string kernel;
        cuda::Event begin;
        cuda::Event end;
    };

    using Key = std::tuple<std::string, uint32_t, uint32_t, uint32_t>;
    static Key key(const std::string& name, const RuntimeShape& shape) {
        return {name, shape.ranks_, shape.row_bytes_, shape.topk_};
    }
    void make_resident(Kernel& kernel, const std::string& name);
    Kernel& find(const std::string& name, const RuntimeShape& shape);
    unsigned max_blocks(Kernel& kernel, const std::string& name, unsigned warps, size_t shared_bytes);
    // `parameter`: points to the only parameter of the kernel.
    uint64_t launch_grid(const std::string& name, const RuntimeShape& shape, unsigned blocks, unsigned ranks,
                         unsigned warps, size_t shared_bytes, const void* parameter);
    bool captured() const;  // like capturing(); requires that the context is current
    cuda::Stream next_stream() const { return next_.value_or(stream_->get()); }
    // Returns the number of the capture that `stream` is part of; 0: none.
    static unsigned long long capture_of(cuda::Stream stream);
    void order_behind(Latest& latest, cuda::Stream stream);
    void make_timed_event(const cuda::Driver& driver);
    cuda::Event take_timed_event();
    void forget_timed();  // keeps their events for later

    const std::shared_ptr<const cuda::PrimaryContext> context_;
    unsigned sharers_;
    const unsigned warps_;
    const uint32_t copies_bytes_;
    const bool cooperative_;
    const std::function<void()> interrupt_check_;
    std::optional<cuda::KernelStream> stream_;
    std::map<Key, Kernel> kernels_;
    uint64_t latest_ = 0;
    std::optional<cuda::Stream> next_;  // launch_on(); none: the own stream
    bool ends_ = false;                 // launch_on()
    Latest launched_;                   // of the launches that no graph captures
    Latest captured_;                   // of those that do go into graphs
    bool several_streams_ = false;      // launches have gone to more than one stream
    bool timing_ = false;
    std::vector<Timed> timed_;
    std::vector<cuda::Event> spare_timed_;
};

}  // namespace deep_ep::host
