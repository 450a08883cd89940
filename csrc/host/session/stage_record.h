// What the kernels of a rank note about their stages (kernels/common/stages.h), for a timeline.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/heap/memory.h"
#include "wire/types.h"

namespace deep_ep::host {

class StageRecord {
  public:
    struct Launch {
        std::string kernel;
        unsigned blocks;
        unsigned warps;             // of each block
        uint64_t launched_ns;       // by the host's steady clock, right before
        std::vector<u64> ended_ns;  // [blocks, warps, stages] by the clock of kernels; 0: the warp had no such stage
    };

    explicit StageRecord(Memory& memory) : memory_(memory) {}
    StageRecord(const StageRecord&) = delete;
    StageRecord& operator=(const StageRecord&) = delete;

    // Begins to record launches, as many as `bytes` have room for. The memory is kept for the next record.
    void start(size_t bytes);
    // The place for the next launch; null: nothing is recorded, or there is no room.
    u64* place(const char* kernel, unsigned blocks, unsigned warps);
    bool on() const { return on_; }
    // Ends the record: later launches get no place.
    void stop() { on_ = false; }
    // After stop(), once the launches have ended: returns them, in order.
    std::vector<Launch> take();
    // After stop(), while some of them may still run.
    void drop();
    // Launches since start() for which there was no room.
    uint64_t lost() const {
        const std::lock_guard<std::mutex> guard(mutex_);
        return lost_;
    }

  private:
    Memory& memory_;
    std::atomic<bool> on_{false};
    mutable std::mutex mutex_;  // guards what follows: a recording may end on another thread than that of a call
    std::shared_ptr<u64> times_;
    size_t room_ = 0, used_ = 0;  // of these
    std::vector<std::shared_ptr<u64>> dropped_;
    uint64_t lost_ = 0;
    std::vector<Launch> launches_;
};

}  // namespace deep_ep::host
