#include "sim/executor/world.h"

#include <algorithm>
#include <stdexcept>

#include "sim/executor/dump.h"

namespace deep_ep::cpu {

namespace {

thread_local int my_rank = -1;  // rank of the calling host thread; never read on a fiber

}  // namespace

u64 World::begin(int ranks, Schedule schedule) {
    if (open_) throw std::logic_error("a world is open already");
    if (scheduler_.kernels_running()) throw std::logic_error("kernels are running: a world starts with none");
    if (ranks < 1) throw std::invalid_argument("a world has at least one rank");
    open_ = true;
    threads_.clear();
    for (int i = 0; i < ranks; i++) threads_.push_back(std::make_unique<RankThread>());
    entered_ = 0;
    called_off_ = false;
    failure_.reset();
    clock_jumps_ = 0;
    last_stall_.clear();
    outer_schedule_ = scheduler_.ready().schedule();
    scheduler_.ready().set_schedule(schedule);
    scheduler_.clock.make_virtual();
    scheduler_.begin_recording();
    return ++number_;
}

void World::enter(int rank, u64 number) {
    if (!open_ || (number != 0 && number != number_)) throw SimtError("this world is over");
    if (rank < 0 || rank >= static_cast<int>(threads_.size())) throw std::logic_error("no such rank here");
    RankThread& thread = *threads_[rank];
    if (thread.state != RankThread::State::kAbsent) throw std::logic_error("this rank has entered already");
    my_rank = rank;
    thread.state = RankThread::State::kStarting;
    // Threads enter in any order, so nothing is drawn before all have entered.
    if (++entered_ == threads_.size() && !called_off_) {
        for (auto& each : threads_) hold_back(*each);
        pass_baton();
    }
    if (!called_off_) take_baton(rank);
    if (!called_off_) return;
    thread.state = RankThread::State::kLeft;
    my_rank = -1;
    failure_->raise();
}

void World::abort(u64 number, const std::string& why) {
    if (!open_ || number != number_) return;
    if (entered_ == threads_.size()) return scheduler_.fail(false, why);  // the driving thread will find it
    called_off_ = true;
    failure_ = Failure{false, why};
    for (auto& thread : threads_) thread->gate.open();
}

void World::leave(int rank) {
    threads_[rank]->state = RankThread::State::kLeft;
    my_rank = -1;
    scheduler_.look_again();  // as in wait()
    pass_baton();
}

bool World::wait(const HostWait& wait) {
    if (my_rank < 0) throw std::logic_error("a thread that belongs to no rank waits inside a world");
    if (failure_) failure_->raise();
    // A first-come, first-served schedule keeps the baton here; a random one may pass it at any wait.
    if (!scheduler_.ready().random() && wait.look()) return true;
    RankThread& self = *threads_[my_rank];
    self.wait = &wait;
    self.state = RankThread::State::kWaiting;
    hold_back(self);
    scheduler_.look_again();  // this thread may have written what a fiber waits for
    pass_baton();
    take_baton(my_rank);
    if (failure_) failure_->raise();
    return wait.look();  // again, now by the waiting thread itself; false: its deadline has passed
}

void World::take_baton(int rank) {
    RankThread& self = *threads_[rank];
    lock_.unlock();
    self.gate.pass();
    lock_.lock();
}

// Chooses the next thread. The caller runs fibers until one can continue.
void World::pass_baton() {
    std::vector<RankThread*> able;
    for (;;) {
        RankThread* held_back = nullptr;  // the thread to be released first
        able.clear();
        bool all_left = true;
        for (auto& thread : threads_) {
            all_left &= thread->state == RankThread::State::kLeft;
            if (!can_go_on(*thread)) continue;
            if (thread->not_before <= scheduler_.ready().turns())
                able.push_back(thread.get());
            else if (!held_back || thread->not_before < held_back->not_before)
                held_back = thread.get();
        }
        if (all_left) return;
        if (!able.empty()) {
            Random& draw = scheduler_.ready().draw();
            const size_t i = scheduler_.ready().random() ? draw.below(able.size()) : 0;
            able[i]->state = RankThread::State::kRunning;
            scheduler_.events().add(~static_cast<u64>(i));
            able[i]->gate.open();
            return;
        }
        if (drive()) continue;
        if (held_back)
            held_back->not_before = 0;
        else
            stall();
    }
}

bool World::can_go_on(const RankThread& thread) const {
    if (thread.state == RankThread::State::kStarting) return true;
    if (thread.state != RankThread::State::kWaiting) return false;
    return failure_ || thread.wait->deadline <= scheduler_.clock.now() || thread.wait->look_for_other();
}

// Half of the waits end as soon as they can. The others last up to some thousand turns longer, so that a rank is
// sometimes late while the kernels of its peers run ahead.
void World::hold_back(RankThread& thread) {
    thread.not_before = 0;
    if (!scheduler_.ready().random()) return;
    Random& draw = scheduler_.ready().draw();
    if (draw.one_in(2)) return;
    thread.not_before = scheduler_.ready().turns() + draw.below(u64{1} << draw.below(14));
}

bool World::drive() {
    lock_.let_others_in();  // never the thread of a rank, but one that wants a dump or wants to abort the world
    const bool ran = scheduler_.run(kTurnsPerLook) != 0;
    if (scheduler_.failure()) die();
    return ran;
}

// No fiber can run and no thread can continue: either the clock jumps, or it is a deadlock.
void World::stall() {
    const u64 first_fiber = scheduler_.earliest_deadline();
    u64 next = first_fiber;
    for (auto& thread : threads_)
        if (thread->state == RankThread::State::kWaiting) next = std::min(next, thread->wait->deadline);
    if (next == kForever) {
        scheduler_.fail(true, "deadlock: no thread can ever run again\n" + dump());
        die();
        return;
    }
    if (next == first_fiber) last_stall_ = dump();  // a kernel is about to time out, not just a host thread
    clock_jumps_++;
    scheduler_.events().add(next);
    scheduler_.clock.jump(next);
}

void World::die() {
    failure_ = scheduler_.failure();
    scheduler_.abandon();
}

WorldStats World::end(bool abandon) {
    if (!open_) throw std::logic_error("no world is open");
    wait_for_stragglers();
    const bool failed_before = failure_.has_value();
    // The last kernels may still be running, as on a GPU after the last launch.
    while (!abandon && !failure_ && scheduler_.kernels_running())
        if (!drive()) stall();
    if (!abandon && !failure_) scheduler_.stop_all_agents();
    scheduler_.abandon();
    tsan::as(tsan::host_fiber, [&] { scheduler_.abandoned.acquire(); });
    scheduler_.streams.release_all();
    WorldStats stats = scheduler_.stats();
    stats.clock_jumps = clock_jumps_;
    open_ = false;
    scheduler_.clock.make_real();
    scheduler_.ready().set_schedule(outer_schedule_);
    if (!abandon && !failed_before && failure_) failure_->raise();  // no rank was left to raise it
    return stats;
}

// A thread of an aborted world may not have left yet.
void World::wait_for_stragglers() {
    const auto inside = [](const std::unique_ptr<RankThread>& thread) {
        return thread->state != RankThread::State::kAbsent && thread->state != RankThread::State::kLeft;
    };
    while (std::any_of(threads_.begin(), threads_.end(), inside)) {
        lock_.unlock();
        sched_yield();
        lock_.lock();
    }
}

std::string World::dump() const {
    std::string text;
    for (size_t rank = 0; rank < threads_.size(); rank++) {
        const RankThread& thread = *threads_[rank];
        if (thread.state == RankThread::State::kWaiting)
            text += "  rank " + std::to_string(rank) + ", host: waits: " + thread.wait->what + "\n";
    }
    return text + dump_fibers(scheduler_);
}

}  // namespace deep_ep::cpu
