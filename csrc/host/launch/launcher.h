// Runs kernels on a rank's device, whatever that is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/common/shape.h"

namespace deep_ep::host {

// True once a graph cannot run any more. Null: there is no graph.
using GraphGone = std::shared_ptr<const std::atomic<bool>>;

class Launcher {
  public:
    virtual ~Launcher() = default;

    // Queues a kernel behind this launcher's earlier ones. `args` is copied. Returns a serial number. `shape`: for
    // launchers whose kernels are compiled for one; zeros for a kernel that takes none.
    virtual uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps,
                            size_t shared_bytes, const void* args, size_t args_bytes) = 0;
    virtual bool finished(uint64_t serial) const = 0;  // a captured launch, 0, is nothing to wait for
    // Of the graph that launches become a part of now.
    virtual GraphGone watch_graph() { return nullptr; }
    // Warps per block. Combine needs two: where rows go in chunks, some send while the others sum.
    virtual unsigned warps() const = 0;
    // Bytes of shared memory that device::RowCopies takes for each warp, in the kernels as they are compiled.
    virtual uint32_t copies_bytes() const = 0;
    // Bytes of dynamic shared memory that a block of any kernel may have.
    virtual size_t max_shared_bytes() const = 0;
    // Bytes stored by all ranks of a node from which on stores should pass the caches by.
    virtual uint64_t streaming_threshold() const = 0;
    // Blocks the calling host thread until `ready()`; what it reads may be written by kernels.
    virtual void wait(const std::function<bool()>& ready, const char* what) = 0;
    // The same for so long: -> whether `ready()`.
    virtual bool wait_for(const std::function<bool()>& ready, const char* what, uint64_t nanoseconds) = 0;
    // Until all that runs on the device has ended, replays of graphs too, or so long: -> whether it has.
    virtual bool wait_for_device(uint64_t nanoseconds) = 0;
};

}  // namespace deep_ep::host
