// A host thread that waits, and the drive of fibers by host threads that are not ranks of a world.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "cpu/executor/executor.h"
#include "cpu/executor/futex.h"
#include "cpu/executor/scheduler.h"

namespace deep_ep::cpu {

constexpr u64 kTurnsPerLook = 32;  // of fibers, between looks at what host threads wait for

struct HostWait {
    const std::function<bool()>& ready;
    const char* what;
    u64 deadline;
    bool interruptible;  // looks at signals, where it is not a world's

    // By the waiting thread itself, which learns what it acquires by looking.
    bool look() const { return tsan::as(tsan::host_fiber, ready); }
    // By another one, which must not.
    bool look_for_other() const { return ready(); }
};

// Outside a world the first thread that waits drives, the others sleep. Fibers of this process may also wait for memory
// that other processes write, so when none can run the driver yields the core and looks again. A thread that looks at
// signals does not drive meanwhile: it may have to wait for the GIL, and a signal's handler may wait in here itself.
class FreeThreads {
  public:
    FreeThreads(Lock& lock, Scheduler& scheduler) : lock_(lock), scheduler_(scheduler) {}

    // With the lock held. False when the deadline came first.
    bool wait(const HostWait& wait);

    // With the lock held.
    int add_helper(Helper helper);
    void remove_helper(int id) { helpers_.erase(id); }

    std::function<void()> interrupt_check;
    // The calling thread has just checked signals elsewhere: its next check is a whole interval away.
    static void interrupts_are_checked() { last_interrupt_check_ = monotonic_ns(); }

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
    bool rest(const HostWait& wait);  // sleeps if nothing has run for long; -> whether a check is due

    Lock& lock_;
    Scheduler& scheduler_;
    std::vector<Sleeper*> waiting_;
    std::map<int, Helper> helpers_;
    pid_t process_ = getpid();
    int next_helper_ = 0;
    bool driving_ = false;
    u64 idle_rounds_ = 0, idle_since_ = 0;  // since a fiber has run, whichever thread drove
    static thread_local u64 last_interrupt_check_;
};

}  // namespace deep_ep::cpu
