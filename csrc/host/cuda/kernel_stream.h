// The stream that kernels run on, which tensors may outlive.
#pragma once

#include <memory>

#include "host/cuda/driver.h"

namespace deep_ep::host::cuda {

// A non-blocking stream of the highest priority, since other ranks wait for communication.
class KernelStream {
  public:
    // `reuse`: whether it may be one that was kept. Ranks that share a GPU do not: their streams need hardware queues
    // of their own, which streams that are made one after the other are most likely to have.
    KernelStream(std::shared_ptr<const PrimaryContext> context, bool reuse);
    ~KernelStream();
    KernelStream(const KernelStream&) = delete;
    KernelStream& operator=(const KernelStream&) = delete;

    Stream get() const { return stream_; }
    // From now on the stream is never destroyed; another object may take it over after this one. When torch's allocator
    // frees a tensor, it records an event on every stream that the tensor was used on (`record_stream`), which may be
    // long after the Buffer whose stream that was. It does so in a destructor, so a destroyed stream would end the
    // process.
    void keep() { kept_ = true; }

  private:
    bool take_spare();

    const std::shared_ptr<const PrimaryContext> context_;
    Stream stream_ = nullptr;
    bool kept_ = false;
};

}  // namespace deep_ep::host::cuda
