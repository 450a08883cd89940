// What a warp's threads execute, put together: which executions of theirs are one of the warp's.
//
// Between two instructions at which all of them meet, the n-th execution of an instruction by a thread is taken to be
// one with the n-th of it by each other. So a warp executes an instruction as often as the thread that executes it
// most.
#pragma once

#include <array>
#include <map>
#include <unordered_map>
#include <vector>

#include "ptx/count/counts.h"

namespace deep_ep::ptx {

struct CountedAccess {
    u64 address;
    u32 bytes;
    bool is_shared, is_peers;
    u8 lane = 0;
};

// What a thread has executed since it last met others.
class ThreadLog {
  public:
    void execute(u32 instruction) { executed_.push_back(instruction << 1); }
    // By the instruction that is executed.
    void access(const CountedAccess& access) {
        executed_.back() |= 1;
        accesses_.push_back(access);
    }

  private:
    friend class WarpCount;
    std::vector<u32> executed_;  // the lowest bit: has an access
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
    // A thread comes to where it meets others.
    void meet(u32 lane);
    void end(u32 lane);
    void wait_for_rows(u32 lane, u64 bytes) {
        logs_[lane].row_bytes_ += bytes;
        ++logs_[lane].row_trips_;
    }
    void meet_block(u32 lane) { ++logs_[lane].block_barriers_; }

  private:
    // Of an instruction's n-th execution.
    struct Interval {
        std::unordered_map<u32, u32> executions;                             // by instruction: the most of any thread
        std::map<std::pair<u32, u32>, std::vector<CountedAccess>> accesses;  // in the order in which threads came
    };

    void put(u32 lane);
    void finish();
    void finish(u32 instruction, std::vector<CountedAccess> accesses);

    KernelCount& kernel_;
    std::array<ThreadLog, kLanes> logs_;
    std::map<u64, Interval> open_;  // that some threads have still to go through
};

}  // namespace deep_ep::ptx
