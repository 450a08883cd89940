// Ranks as threads of one process. One of them runs at a time and passes the baton when it waits; fibers run only while
// all ranks wait; the clock stands still until nothing can run. The execution is therefore a function of the seed.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sim/executor/host_wait.h"

namespace deep_ep::cpu {

class World {
  public:
    World(Lock& lock, Scheduler& scheduler) : lock_(lock), scheduler_(scheduler) {}

    // All are called with the lock held. It is released while a thread waits for the baton.
    u64 begin(int ranks, Schedule schedule);
    void enter(int rank, u64 number);
    void leave(int rank);
    void abort(u64 number, const std::string& why);
    WorldStats end(bool abandon);
    bool wait(const HostWait& wait);

    bool open() const { return open_; }
    std::string dump() const;
    const std::string& last_stall() const { return last_stall_; }

  private:
    struct RankThread {
        enum class State { kAbsent, kStarting, kWaiting, kRunning, kLeft };
        State state = State::kAbsent;
        const HostWait* wait = nullptr;
        u64 not_before = 0;  // in turns: a thread may be held back while the others continue
        Gate gate;
    };

    void take_baton(int rank);
    void pass_baton();
    bool can_go_on(const RankThread& thread) const;
    void hold_back(RankThread& thread);
    // Runs fibers until something may have changed for a host thread. Returns false if none could run.
    bool drive();
    void stall();
    void wait_for_stragglers();
    void die();

    Lock& lock_;
    Scheduler& scheduler_;
    bool open_ = false;
    u64 number_ = 0;           // counts worlds: a thread that is late for one must not enter the next
    bool called_off_ = false;  // aborted before all threads had entered
    std::vector<std::unique_ptr<RankThread>> threads_;
    size_t entered_ = 0;
    std::optional<Failure> failure_;  // every wait in this world ends with it
    Schedule outer_schedule_;
    u64 clock_jumps_ = 0;
    std::string last_stall_;
};

}  // namespace deep_ep::cpu
