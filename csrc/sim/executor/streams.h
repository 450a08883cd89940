// Streams, and the memory of the kernel that runs in each. A stream runs one kernel at a time, so it owns one set of
// fibers, stacks and shared memory and reuses it for every launch: a warm launch allocates nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "sim/executor/executor.h"
#include "sim/executor/fiber.h"
#include "sim/executor/stacks.h"

namespace deep_ep::cpu {

struct Stream;

constexpr size_t kMaxArgsBytes = 4096 - 64;    // about CUDA's own limit on a kernel's parameters
constexpr size_t kMaxStaticShared = 48 << 10;  // CUDA's

// A launch's arguments, in memory of its own: kernels read them while the next launch is being prepared.
class Args {
  public:
    Args() : pages_(4096) {}
    char* data() const { return pages_.data() + 64; }
    tsan::SyncPoint& launched() const { return *reinterpret_cast<tsan::SyncPoint*>(pages_.data()); }

  private:
    Pages pages_;
};

struct PendingLaunch {
    Launch launch;
    u64 serial;
    Args args;
};

// The running kernel of a stream, or the memory for one.
struct Grid {
    Stream* stream = nullptr;
    Launch launch{};
    u64 serial = 0;
    u64 began = 0;  // for a timeline that is being recorded
    Args args;
    size_t size() const { return size_t{launch.blocks} * launch.threads; }  // fibers
    unsigned live_blocks = 0;
    std::vector<Block> blocks;
    std::vector<Warp> warps;
    std::vector<Fiber> fibers;  // as many as the largest launch so far needed
};

struct Stream {
    Stream() { grid.stream = this; }
    ~Stream() { forget_fibers(); }

    void enqueue(const Launch& launch, u64 serial);
    // Makes the oldest pending launch the running one. The caller must then queue its fibers.
    void start(void (*entry)());
    void finish();
    // Drops all pending and running kernels without unwinding. Abandoned stacks still carry sanitizer state, which is
    // reset here.
    void abandon();

    bool running = false;
    std::atomic<u64> finished{0};  // serial of the last launch that has ended
    u64 last_enqueued = 0;
    std::deque<PendingLaunch> pending;
    Grid grid;

    // The end of kernel k happens before the start of kernel k+1. Two points alternate: a thread of kernel k that
    // starts late must not be ordered after a thread of the same kernel that has ended early.
    tsan::SyncPoint& ended(u64 kernel) { return ended_[kernel % 2]; }
    u64 kernels = 0;  // started so far

  private:
    void set_up_blocks();
    void set_up_fibers(void (*entry)());
    void forget_fibers();

    std::vector<Args> free_args_;
    Stacks stacks_;
    Pages shared_;
    tsan::SyncPoint ended_[2];
    std::vector<void*> tsan_fibers_;  // kept like the stacks: their clocks only cover earlier kernels of this stream
};

}  // namespace deep_ep::cpu
