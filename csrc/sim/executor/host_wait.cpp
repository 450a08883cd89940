#include "sim/executor/host_wait.h"

#include <algorithm>
#include <ctime>

#include "sim/executor/dump.h"

namespace deep_ep::cpu {

namespace {

// Idle looks before the core is yielded to another process. A look takes longer than a yield that finds no other
// process; on 2 cores with 8 ranks combine in local chunks took 1.3 times as long with 16.
constexpr u64 kSpins = 1;
constexpr u64 kAwake = 20'000'000;                 // ns of idle looks before this process sleeps between them
constexpr timespec kNap = {0, 100'000};            // length of one such sleep
constexpr u64 kInterruptCheckEvery = 200'000'000;  // ns
constexpr u64 kLooksPerDeadline = 16;              // while fibers run: reading the clock takes as long as a turn

}  // namespace

thread_local u64 FreeThreads::last_interrupt_check_ = 0;

bool FreeThreads::wait(const HostWait& wait) {
    Sleeper self{wait, {}, {}};
    waiting_.push_back(&self);
    struct Leave {
        FreeThreads& threads;
        Sleeper& self;
        ~Leave() {
            auto& waiting = threads.waiting_;
            waiting.erase(std::find(waiting.begin(), waiting.end(), &self));
            threads.pass_on();
        }
    } leave{*this, self};

    for (;;) {
        if (self.failure) self.failure->raise();
        if (wait.look()) return true;
        if (wait.deadline != kForever && scheduler_.clock.now() >= wait.deadline) return false;
        if (check_is_due(wait, observe::monotonic_ns())) {
            check_interrupts();
        } else if (driving_) {
            sleep(self);
        } else {
            drive(self);
        }
    }
}

// Returns when the caller should look for itself.
void FreeThreads::drive(Sleeper& self) {
    struct Driving {
        FreeThreads& threads;
        explicit Driving(FreeThreads& threads) : threads(threads) { threads.driving_ = true; }
        ~Driving() {
            threads.driving_ = false;
            threads.leave();
        }
    } driving(*this);

    for (u64 looks = 1;; ++looks) {
        lock_.let_others_in();
        const bool ran = scheduler_.run(kTurnsPerLook) != 0, helped = help();
        bool check = false;
        if (scheduler_.failure()) return fail_all();
        if (ran || helped) {
            idle_rounds_ = 0;
            if (!ran) scheduler_.look_again();
        } else if (scheduler_.stuck()) {
            scheduler_.fail(true, "deadlock: no thread can ever run again\n" + dump_fibers(scheduler_));
            return fail_all();
        } else {
            check = rest(self.wait);
            scheduler_.look_again();
        }
        if (check || self.wait.look()) return;
        const bool is_timed = self.wait.deadline != kForever && (!ran || looks % kLooksPerDeadline == 0);
        if (is_timed && scheduler_.clock.now() >= self.wait.deadline) return;
        if (waiting_.size() > 1) wake_ready(self);
    }
}

int FreeThreads::add_helper(Helper helper) {
    if (process_ != getpid()) {
        process_ = getpid();
        helpers_.clear();
    }
    helpers_.emplace(next_helper_, std::move(helper));
    return next_helper_++;
}

// Helpers run in the context of the host thread: unlike the executor's, their accesses belong to a thread.
bool FreeThreads::help() {
    bool helped = false;
    if (process_ != getpid()) return false;
    for (const auto& [id, helper] : helpers_) helped = tsan::as(tsan::host_fiber, helper.help) || helped;
    return helped;
}

void FreeThreads::leave() {
    if (process_ != getpid()) return;
    for (const auto& [id, helper] : helpers_) {
        if (helper.leave) tsan::as(tsan::host_fiber, helper.leave);
    }
}

void FreeThreads::sleep(Sleeper& self) {
    self.asleep = true;
    lock_.unlock();
    self.gate.pass_within(kInterruptCheckEvery);
    lock_.lock();
    self.asleep = false;
}

bool FreeThreads::check_is_due(const HostWait& wait, u64 now) const {
    return wait.interruptible && interrupt_check && now - last_interrupt_check_ >= kInterruptCheckEvery;
}

void FreeThreads::check_interrupts() {
    interrupts_are_checked();  // a signal handler may itself wait in here
    pass_on();
    // The check may take the GIL, whose holder may want the lock.
    lock_.unlock();
    struct Relock {
        Lock& lock;
        ~Relock() { lock.lock(); }
    } relock{lock_};
    interrupt_check();
    interrupts_are_checked();  // it may have waited long for the GIL; now this thread should drive, not check again
}

// Wakes a sleeping thread to drive. A thread that is checking signals is not chosen: that may take long, and it drives
// afterwards anyway.
void FreeThreads::pass_on() {
    if (driving_) return;
    const auto next = std::find_if(waiting_.begin(), waiting_.end(), [](const Sleeper* one) { return one->asleep; });
    if (next == waiting_.end()) return;
    (*next)->asleep = false;
    (*next)->gate.open();
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

bool FreeThreads::rest(const HostWait& wait) {
    if (idle_rounds_++ < kSpins) return cpu_relax(), false;
    const u64 now = observe::monotonic_ns();
    if (idle_rounds_ == kSpins + 1) idle_since_ = now;
    if (now - idle_since_ < kAwake) {
        sched_yield();
    } else {
        nanosleep(&kNap, nullptr);
    }
    return check_is_due(wait, now);
}

}  // namespace deep_ep::cpu
