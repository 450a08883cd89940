#include "sim/executor/executor.h"

#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "sim/executor/dump.h"
#include "sim/executor/host_wait.h"
#include "sim/executor/scheduler.h"
#include "sim/executor/world.h"

namespace deep_ep::cpu {

struct Executor::State {
    Lock lock;
    Scheduler& scheduler = Scheduler::get();
    FreeThreads free_threads{lock, scheduler};
    World world{lock, scheduler};
    std::deque<bool> events;
    bool by_time = false;

    bool wait(const std::function<bool()>& ready, const char* what, u64 deadline, bool interruptible = true) {
        const HostWait wait{ready, what, deadline, interruptible};
        return world.open() ? world.wait(wait) : free_threads.wait(wait);
    }
};

using Guard = std::lock_guard<Lock>;

namespace {

void check(const Launch& launch) {
    auto require = [&](bool holds, const char* rule) {
        if (!holds) throw std::invalid_argument(std::string("launch of ") + launch.name + ": " + rule);
    };
    require(launch.blocks > 0, "blocks must be positive");
    require(launch.threads > 0 && launch.threads <= 1024, "threads must be 1 to 1024");
    require(launch.args_bytes <= kMaxArgsBytes, "the arguments take more than 4032 bytes");
    require(launch.shared_bytes <= kMaxSharedBytes, "more than 227 KiB of shared memory");
    require(launch.entry != nullptr, "no entry point");
}

}  // namespace

Executor::Executor() : state_(new State()) {}
Executor::~Executor() = default;

Executor& Executor::get() {
    static Executor* executor = new Executor();  // fibers may outlive static destructors
    return *executor;
}

int Executor::new_stream() {
    Guard guard(state_->lock);
    return state_->scheduler.new_stream();
}

void Executor::release_stream(int rank, int stream) {
    Guard guard(state_->lock);
    state_->scheduler.streams.release(rank, stream);
}

uint64_t Executor::launch(const Launch& launch) {
    check(launch);
    Guard guard(state_->lock);
    return state_->scheduler.launch(launch);
}

bool Executor::finished(uint64_t serial) const { return state_->scheduler.finished(serial); }

void Executor::synchronize(int rank, int stream) {
    Guard guard(state_->lock);
    const u64 serial = state_->scheduler.streams.last_launch(rank, stream);
    if (serial == 0) return;
    state_->wait([this, serial] { return finished(serial); }, "synchronize", kForever);
}

bool Executor::wait(const std::function<bool()>& ready, const char* what, uint64_t deadline_ns) {
    Guard guard(state_->lock);
    return state_->wait(ready, what, deadline_ns);
}

int Executor::add_agent(int rank, std::string name, std::function<void()> body) {
    Guard guard(state_->lock);
    return state_->scheduler.add_agent(rank, std::move(name), std::move(body))->id;
}

void Executor::remove_agent(int id) {
    Guard guard(state_->lock);
    Scheduler& scheduler = state_->scheduler;
    const auto gone_or = [&](auto condition) {
        return [&scheduler, id, condition] {
            const Agent* agent = scheduler.agent(id);
            return !agent || condition(*agent);
        };
    };
    try {
        const auto idle = gone_or([&](const Agent& agent) { return scheduler.idle(agent); });
        if (!idle()) state_->wait(idle, "agent to be idle", kForever, false);
        if (Agent* agent = scheduler.agent(id)) scheduler.stop(*agent);
        const auto done = gone_or([](const Agent& agent) { return agent.done; });
        if (!done()) state_->wait(done, "agent to end", kForever, false);
    } catch (const DeadlockError&) {  // a failure drops all agents; other waits report it
    } catch (const SimtError&) {
    }
    if (Agent* agent = scheduler.agent(id)) scheduler.remove(*agent);
}

int Executor::add_helper(Helper helper) {
    Guard guard(state_->lock);
    return state_->free_threads.add_helper(std::move(helper));
}

void Executor::remove_helper(int id) {
    Guard guard(state_->lock);
    state_->free_threads.remove_helper(id);
}

uint64_t Executor::random() {
    ReadyQueue& ready = state_->scheduler.ready();
    return ready.random() ? ready.draw().next() : 0;
}

uint64_t Executor::world_begin(int ranks, Schedule schedule) {
    Guard guard(state_->lock);
    schedule.by_time = state_->by_time;
    const uint64_t number = state_->world.begin(ranks, schedule);
    state_->events.clear();
    return number;
}

void Executor::world_enter(int rank, uint64_t number) {
    Guard guard(state_->lock);
    state_->world.enter(rank, number);
}

void Executor::world_leave(int rank) {
    Guard guard(state_->lock);
    state_->world.leave(rank);
}

void Executor::world_abort(uint64_t number, const std::string& why) {
    Guard guard(state_->lock);
    state_->world.abort(number, why);
}

WorldStats Executor::world_end(bool abandon) {
    Guard guard(state_->lock);
    return state_->world.end(abandon);
}

bool Executor::in_world() const { return state_->world.open(); }

int Executor::new_event() {
    Guard guard(state_->lock);
    state_->events.push_back(false);
    return static_cast<int>(state_->events.size()) - 1;
}

void Executor::set_event(int id) {
    Guard guard(state_->lock);
    state_->events.at(static_cast<size_t>(id)) = true;
}

void Executor::wait_event(int id, const char* what) {
    Guard guard(state_->lock);
    const bool& event = state_->events.at(static_cast<size_t>(id));
    state_->wait([&] { return event; }, what, kForever);
}

void Executor::set_schedule(Schedule schedule) {
    Guard guard(state_->lock);
    if (state_->world.open()) throw std::logic_error("a world has its own schedule");
    state_->scheduler.ready().set_schedule(schedule);
}

void Executor::schedule_by_time(bool on) {
    Guard guard(state_->lock);
    state_->by_time = on;
    if (!state_->world.open()) state_->scheduler.ready().set_schedule({.by_time = on});
}

uint64_t Executor::now_ns() { return state_->scheduler.clock.now(); }

std::string Executor::last_stall() const {
    Guard guard(state_->lock);
    return state_->world.last_stall();
}

std::string Executor::dump() const {
    Guard guard(state_->lock);
    return state_->world.open() ? state_->world.dump() : dump_fibers(state_->scheduler);
}

void Executor::share_memory(const void* begin, size_t bytes, int owner) {
    Guard guard(state_->lock);
    state_->scheduler.memory.add(begin, bytes, owner);
}

void Executor::unshare_memory(const void* begin) {
    Guard guard(state_->lock);
    state_->scheduler.memory.remove(begin);
}

void Executor::map_host_memory(const void* begin, size_t bytes) {
    Guard guard(state_->lock);
    state_->scheduler.host_memory.add(begin, bytes, -1);
}

void Executor::unmap_host_memory(const void* begin) {
    Guard guard(state_->lock);
    state_->scheduler.host_memory.remove(begin);
}

unsigned Executor::warp_size() { return kWarpWidth; }

void Executor::interrupts_are_checked() { FreeThreads::interrupts_are_checked(); }

void Executor::set_interrupt_check(std::function<void()> check) {
    Guard guard(state_->lock);
    state_->free_threads.interrupt_check = std::move(check);
}

}  // namespace deep_ep::cpu
