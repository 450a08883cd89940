#include "host/cuda/kernel_stream.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace deep_ep::host::cuda {
namespace {

struct Spare {
    std::shared_ptr<const PrimaryContext> context;  // streams do not outlive their context
    std::vector<Stream> streams;
};

struct Spares {
    std::mutex mutex;
    std::map<Device, Spare> by_device;
};

Spares& spares() {
    static auto* all = new Spares();  // Buffers may be destroyed after static objects
    return *all;
}

}  // namespace

KernelStream::KernelStream(std::shared_ptr<const PrimaryContext> context, bool reuse) : context_(std::move(context)) {
    const Driver& driver = Driver::get();
    const PrimaryContext::Current current(*context_);
    if (reuse && take_spare()) return;
    int least = 0, greatest = 0;
    driver.check(driver.stream_priorities(&least, &greatest), "asking for stream priorities");
    driver.check(driver.stream_create(&stream_, kStreamNonBlocking, greatest), "making a stream");
}

KernelStream::~KernelStream() {
    if (kept_) {
        const std::lock_guard<std::mutex> guard(spares().mutex);
        Spare& spare = spares().by_device[context_->ordinal()];
        spare.context = context_;
        spare.streams.push_back(stream_);
        return;
    }
    // The driver keeps it until kernels that are still running have ended.
    const PrimaryContext::Current current(*context_, std::nothrow);
    if (current) Driver::get().stream_destroy(stream_);
}

bool KernelStream::take_spare() {
    const Driver& driver = Driver::get();
    const std::lock_guard<std::mutex> guard(spares().mutex);
    std::vector<Stream>& streams = spares().by_device[context_->ordinal()].streams;
    // One on which a kernel still waits for a failed rank would hold up the kernels of this object.
    const auto idle = std::find_if(streams.begin(), streams.end(),
                                   [&](Stream stream) { return driver.stream_query(stream) == kSuccess; });
    if (idle == streams.end()) return false;
    stream_ = *idle;
    kept_ = true;
    streams.erase(idle);
    return true;
}

}  // namespace deep_ep::host::cuda
