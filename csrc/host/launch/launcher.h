// Runs kernels on the device of a rank.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/common/kernel.h"
#include "kernels/common/shape.h"

namespace deep_ep::host {

// Becomes true once a graph can no longer run. Null: there is no graph.
using GraphGone = std::shared_ptr<const std::atomic<bool>>;

struct ChunkSizes {
    uint32_t most_bytes;  // with one hop
    uint32_t least_rows;  // with two hops, if a region has room for them
};
// Chunks of these sizes are large enough to amortize their handshake, and efficient messages for a NIC. On a CPU the
// slots of all row streams stay in a cache between the write and the read (on 2 cores with 8 ranks, combine through
// chunks took half as long as with 2 MiB). On a GPU the handshake takes longer, most of all the two posts, and few rows
// leave most of a block's warps idle (by the model of docs/ptx.md, a dispatch on 16 blocks takes 97 us, and 197 us with
// 128 KiB; one in two hops 92 us, and 142 us with 9 rows).
constexpr ChunkSizes kCpuChunks{128 << 10, 1}, kGpuChunks{512 << 10, 32};

class Launcher {
  public:
    virtual ~Launcher() = default;

    // Queues a kernel behind this launcher's earlier ones. Copies `args`. Returns a serial number. `shape`: for
    // launchers whose kernels are compiled for one; zeros for a kernel that takes none.
    virtual uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps,
                            size_t shared_bytes, const void* args, size_t args_bytes) = 0;
    // Whether a launch has ended. A captured one has no number.
    virtual bool finished(uint64_t serial) const = 0;
    // False if finished() only tells when no launch runs on this launcher's own stream. The kernels of a call then tell
    // when they have ended (wire::Outcome::launches_ended).
    virtual bool tracks_launches() const = 0;
    // Whether launches currently become part of a graph.
    virtual bool capturing() const { return false; }
    // Watches that graph.
    virtual GraphGone watch_graph() { return nullptr; }
    // Warps per block.
    virtual unsigned warps() const = 0;
    // Bytes of shared memory per warp that device::RowCopies takes in the kernels as compiled.
    virtual uint32_t copies_bytes() const = 0;
    // Maximum bytes of dynamic shared memory that a block of any kernel may have.
    virtual size_t max_shared_bytes() const = 0;
    // How rows should travel. It is the same on all ranks.
    virtual ChunkSizes chunks() const = 0;
    // The number of bytes stored by all ranks of a node from which stores should bypass the caches.
    virtual uint64_t streaming_threshold() const = 0;
    // Blocks the calling host thread until `ready()`, which may read memory that kernels write.
    virtual void wait(const std::function<bool()>& ready, const char* what) = 0;
    // The same for at most `nanoseconds`. Returns whether `ready()`.
    virtual bool wait_for(const std::function<bool()>& ready, const char* what, uint64_t nanoseconds) = 0;
    // Waits until all work on the device has ended, including graph replays, for at most `nanoseconds`. Returns whether
    // it has.
    virtual bool wait_for_device(uint64_t nanoseconds) = 0;
};

// The sizes of a kernel's block, of which `block` has the usual number of warps: fewer if the kernel says so
// (kFewerWarps) and its shared memory would not suffice otherwise.
template <class Kernel>
BlockSizes fitting(const Launcher& launcher, BlockSizes block) {
    if constexpr (requires { Kernel::kFewerWarps; }) {
        while (block.warps > 1 && Kernel::shared_bytes(block) > launcher.max_shared_bytes()) block.warps /= 2;
    }
    return block;
}

}  // namespace deep_ep::host
