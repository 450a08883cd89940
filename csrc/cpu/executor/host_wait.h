// A host thread that waits, and the drive of fibers by host threads that are not ranks of a world.
#pragma once

#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "cpu/executor/futex.h"
#include "cpu/executor/scheduler.h"

namespace deep_ep::cpu {

constexpr u64 kTurnsPerLook = 32;  // of fibers, between looks at what host threads wait for

struct HostWait {
    const std::function<bool()>& ready;
    const char* what;
    u64 deadline;

    // By the waiting thread itself, which learns what it acquires by looking.
    bool look() const { return tsan::as(tsan::host_fiber, ready); }
    // By another one, which must not.
    bool look_for_other() const { return ready(); }
};

// Outside a world the first thread that waits drives, the others sleep. Fibers of this process may also wait for memory
// that other processes write, so when none can run the driver yields the core and looks again.
class FreeThreads {
  public:
    FreeThreads(Lock& lock, Scheduler& scheduler) : lock_(lock), scheduler_(scheduler) {}

    // With the lock held. False when the deadline came first.
    bool wait(const HostWait& wait);

    std::function<void()> interrupt_check;
    // Signals have just been checked elsewhere: the next check is a whole interval away. With the lock held.
    void interrupts_are_checked() { last_interrupt_check_ = monotonic_ns(); }

  private:
    struct Sleeper {
        const HostWait& wait;
        std::optional<Failure> failure;
        Gate gate;
    };
    void drive(Sleeper& self);
    void wake_ready(const Sleeper& driver);
    void fail_all();
    void rest(u64 idle_rounds);  // the more, the longer

    Lock& lock_;
    Scheduler& scheduler_;
    std::vector<Sleeper*> waiting_;
    bool driving_ = false;
    std::thread::id driver_;  // while it drives; a signal's handler may wait in it once more
    u64 last_interrupt_check_ = 0;
    u64 idle_since_ = 0;
};

}  // namespace deep_ep::cpu
