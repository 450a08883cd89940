#include "cpu/executor/host_wait.h"

#include <algorithm>
#include <ctime>

#include "cpu/executor/dump.h"

namespace deep_ep::cpu {

namespace {

constexpr u64 kSpins = 16;                        // idle looks before the core is given to another process
constexpr u64 kAwake = 20'000'000;                // ns of idle looks before this process sleeps between them,
constexpr timespec kNap = {0, 100'000};           // for so long
constexpr u64 kInterruptCheckEvery = 50'000'000;  // ns

}  // namespace

bool FreeThreads::wait(const HostWait& wait) {
    Sleeper self{wait, {}, {}};
    waiting_.push_back(&self);
    struct Leave {
        FreeThreads& threads;
        Sleeper& self;
        ~Leave() {
            auto& waiting = threads.waiting_;
            waiting.erase(std::find(waiting.begin(), waiting.end(), &self));
            if (!threads.driving_ && !waiting.empty()) waiting.front()->gate.open();
        }
    } leave{*this, self};

    for (;;) {
        if (self.failure) self.failure->raise();
        if (wait.look()) return true;
        if (wait.deadline != kForever && scheduler_.clock.now() >= wait.deadline) return false;
        if (driving_ && driver_ != std::this_thread::get_id()) {
            lock_.unlock();
            self.gate.pass();
            lock_.lock();
        } else {
            drive(self);
        }
    }
}

// Returns when the caller should look for itself.
void FreeThreads::drive(Sleeper& self) {
    struct Driving {
        bool& flag;
        const bool before;  // nested: by a handler, while this thread's outer wait rests
        explicit Driving(bool& flag) : flag(flag), before(flag) { flag = true; }
        ~Driving() { flag = before; }
    } driving(driving_);
    driver_ = std::this_thread::get_id();

    for (u64 idle_rounds = 0;;) {
        lock_.let_others_in();
        const bool ran = scheduler_.run(kTurnsPerLook) != 0;
        if (scheduler_.failure()) return fail_all();
        if (ran) {
            idle_rounds = 0;
        } else if (scheduler_.stuck()) {
            scheduler_.fail(true, "deadlock: no thread can ever run again\n" + dump_fibers(scheduler_));
            return fail_all();
        } else {
            rest(idle_rounds++);
            scheduler_.look_again();
        }
        if (self.wait.look()) return;
        if (!ran && self.wait.deadline != kForever && scheduler_.clock.now() >= self.wait.deadline) return;
        if (waiting_.size() > 1) wake_ready(self);
    }
}

void FreeThreads::wake_ready(const Sleeper& driver) {
    for (Sleeper* sleeper : waiting_) {
        if (sleeper == &driver) continue;
        const u64 deadline = sleeper->wait.deadline;
        if (sleeper->wait.look_for_other() || (deadline != kForever && scheduler_.clock.now() >= deadline))
            sleeper->gate.open();
    }
}

void FreeThreads::fail_all() {
    const Failure failure = *scheduler_.failure();
    scheduler_.abandon();
    for (Sleeper* sleeper : waiting_) {
        sleeper->failure = failure;
        sleeper->gate.open();
    }
}

void FreeThreads::rest(u64 idle_rounds) {
    if (idle_rounds < kSpins) return cpu_relax();
    const u64 now = monotonic_ns();
    if (idle_rounds == kSpins) idle_since_ = now;
    if (now - idle_since_ < kAwake) {
        sched_yield();
    } else {
        nanosleep(&kNap, nullptr);
    }
    if (!interrupt_check) return;
    if (now - last_interrupt_check_ < kInterruptCheckEvery) return;
    last_interrupt_check_ = now;
    // The check may take the GIL, whose holder may want the lock.
    lock_.unlock();
    struct Relock {
        Lock& lock;
        ~Relock() { lock.lock(); }
    } relock{lock_};
    interrupt_check();
}

}  // namespace deep_ep::cpu
