// Waits of host threads, and how host threads outside a world drive fibers.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "observe/clock.h"
#include "sim/executor/executor.h"
#include "sim/executor/futex.h"
#include "sim/executor/scheduler.h"

namespace deep_ep::cpu {

constexpr u64 kTurnsPerLook = 32;  // turns of fibers between evaluations of what host threads wait for

struct HostWait {
    const std::function<bool()>& ready;
    const char* what;
    u64 deadline;
    bool interruptible;  // checks signals, unless it is a wait in a world

    // Called by the waiting thread itself, which is ordered by what it acquires.
    bool look() const { return tsan::as(tsan::host_fiber, ready); }
    // Called by another thread, which must not be.
    bool look_for_other() const { return ready(); }
};

// Outside a world the first thread that waits drives the fibers, and the others sleep. Fibers may also wait for memory
// that other processes write, so when none can run the driver yields the core and looks again. A thread does not drive
// while it checks signals: it may have to wait for the GIL, and a signal handler may itself wait in here.
class FreeThreads {
  public:
    FreeThreads(Lock& lock, Scheduler& scheduler) : lock_(lock), scheduler_(scheduler) {}

    // With the lock held. Returns false if the deadline came first.
    bool wait(const HostWait& wait);

    // With the lock held.
    int add_helper(Helper helper);
    void remove_helper(int id) { helpers_.erase(id); }

    std::function<void()> interrupt_check;
    // To be called when the calling thread has just checked signals elsewhere: its next check is a full interval away.
    static void interrupts_are_checked() { last_interrupt_check_ = observe::monotonic_ns(); }

  private:
    struct Sleeper {
        const HostWait& wait;
        std::optional<Failure> failure;
        Gate gate;
        bool asleep = false;
    };
    void drive(Sleeper& self);
    void sleep(Sleeper& self);
    void check_interrupts();
    bool check_is_due(const HostWait& wait, u64 now) const;
    void pass_on();
    void wake_ready(const Sleeper& driver);
    void fail_all();
    bool help();
    void leave();
    bool rest(const HostWait& wait);  // sleeps if nothing has run for a long time; returns whether a check is due

    Lock& lock_;
    Scheduler& scheduler_;
    std::vector<Sleeper*> waiting_;
    std::map<int, Helper> helpers_;
    pid_t process_ = getpid();
    int next_helper_ = 0;
    bool driving_ = false;
    u64 idle_rounds_ = 0, idle_since_ = 0;  // since a fiber last ran, whichever thread drove
    static thread_local u64 last_interrupt_check_;
};

}  // namespace deep_ep::cpu
