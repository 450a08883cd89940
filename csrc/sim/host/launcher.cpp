#include "sim/host/launcher.h"

#include "device/device.h"
#include "observe/timeline.h"
#include "sim/executor/executor.h"
#include "sim/vector/vector.h"

namespace deep_ep::host {

CpuLauncher::CpuLauncher(int rank, const void* words, size_t bytes, std::shared_ptr<const KernelSource> kernels)
    : rank_(rank), stream_(cpu::Executor::get().new_stream()), words_(words), kernels_(std::move(kernels)) {
    cpu::Executor::get().share_memory(words, bytes, -1);
}

CpuLauncher::~CpuLauncher() {
    cpu::Executor::get().release_stream(rank_, stream_);
    cpu::Executor::get().unshare_memory(words_);
}

uint64_t CpuLauncher::launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps,
                             size_t shared_bytes, const void* args, size_t args_bytes) {
    cpu::Launch launch{};
    launch.name = kernel;
    launch.rank = rank_;
    launch.stream = stream_;
    launch.blocks = blocks;
    launch.threads = warps * device::kWarpSize;
    launch.shared_bytes = shared_bytes;
    launch.args = args;
    launch.args_bytes = args_bytes;
    std::string held;
    kernels_->find(launch, shape, held);
    return cpu::Executor::get().launch(launch);
}

bool CpuLauncher::finished(uint64_t serial) const { return cpu::Executor::get().finished(serial); }

uint32_t CpuLauncher::copies_bytes() const { return kernels_->copies_bytes(); }

uint64_t CpuLauncher::streaming_threshold() const { return cpu::streaming_threshold(); }

void CpuLauncher::wait(const std::function<bool()>& ready, const char* what) {
    const uint64_t begin = observe::timeline::now();
    cpu::Executor::get().wait(ready, what);
    record(begin, what);
}

bool CpuLauncher::wait_for(const std::function<bool()>& ready, const char* what, uint64_t nanoseconds) {
    cpu::Executor& executor = cpu::Executor::get();
    const uint64_t begin = observe::timeline::now();
    const bool is_ready = executor.wait(ready, what, executor.now_ns() + nanoseconds);
    record(begin, what);
    return is_ready;
}

void CpuLauncher::record(uint64_t begin, const char* what) const {
    if (begin == 0) return;
    observe::timeline::add({observe::timeline::Kind::kHostWait, rank_, -1, static_cast<u32>(stream_), 0, 0, begin,
                            observe::timeline::now(), 0, nullptr, what});
}

}  // namespace deep_ep::host
