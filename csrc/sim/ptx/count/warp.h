// Merges what the threads of a warp execute into executions by the warp.
//
// Between two instructions at which all of its threads meet, the n-th executions of an instruction by the threads count
// as one execution by the warp. A warp therefore executes an instruction as often as the thread that executes it most.
#pragma once

#include <array>
#include <map>
#include <unordered_map>
#include <vector>

#include "sim/ptx/count/counts.h"

namespace deep_ep::ptx {

struct CountedAccess {
    u64 address;
    u32 bytes;
    bool is_shared, is_peers;
    u8 lane = 0;
};

// What a thread has executed since it last met the other threads of its warp.
class ThreadLog {
  public:
    void execute(u32 instruction) { executed_.push_back(instruction << 1); }
    // An access by the current instruction.
    void access(const CountedAccess& access) {
        executed_.back() |= 1;
        accesses_.push_back(access);
    }

  private:
    friend class WarpCount;
    std::vector<u32> executed_;  // instruction numbers; the lowest bit says that it has an access
    std::vector<CountedAccess> accesses_;
    u64 interval_ = 0;
    bool has_ended_ = false;
    u64 row_bytes_ = 0, row_trips_ = 0, block_barriers_ = 0;
};

class WarpCount {
  public:
    static constexpr u32 kLanes = 32;

    WarpCount(KernelCount& kernel, u32 threads) : kernel_(kernel) {
        for (u32 lane = threads; lane < kLanes; ++lane) logs_[lane].has_ended_ = true;
    }
    ~WarpCount();
    WarpCount(const WarpCount&) = delete;
    WarpCount& operator=(const WarpCount&) = delete;

    ThreadLog& log(u32 lane) { return logs_[lane]; }
    // A thread reaches an instruction at which all threads of the warp meet.
    void meet(u32 lane);
    void end(u32 lane);
    void wait_for_rows(u32 lane, u64 bytes) {
        logs_[lane].row_bytes_ += bytes;
        ++logs_[lane].row_trips_;
    }
    void meet_block(u32 lane) { ++logs_[lane].block_barriers_; }

  private:
    // What the warp executes between two barriers.
    struct Interval {
        std::unordered_map<u32, u32> executions;  // by instruction: the most of any thread
        // By instruction and index of its execution.
        std::map<std::pair<u32, u32>, std::vector<CountedAccess>> accesses;
    };

    void put(u32 lane);
    void finish();
    void finish(u32 instruction, std::vector<CountedAccess> accesses);

    KernelCount& kernel_;
    std::array<ThreadLog, kLanes> logs_;
    std::map<u64, Interval> open_;  // not completed by all threads yet
};

}  // namespace deep_ep::ptx
