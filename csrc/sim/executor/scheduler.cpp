#include "sim/executor/scheduler.h"

#include <algorithm>
#include <stdexcept>

#include "sim/executor/builtin_variables.h"
#include "sim/executor/futex.h"

BuiltinIndex threadIdx{0, 0, 0};
BuiltinIndex blockIdx{0, 0, 0};
BuiltinIndex blockDim{1, 1, 1};
BuiltinIndex gridDim{1, 1, 1};

namespace deep_ep::cpu {

Fiber* current = nullptr;
bool memory_switches = false;

namespace {

constexpr u64 kTurnsPerPoll = 64;  // fibers that are always ready must not starve those that poll

// Sets threadIdx and the other built-in variables for a fiber.
void show(const Fiber& fiber) {
    threadIdx.x = fiber.thread;
    blockIdx.x = fiber.block->index;
    if (const Grid* grid = fiber.block->grid) {
        blockDim.x = grid->launch.threads;
        gridDim.x = grid->launch.blocks;
    }
}

}  // namespace

int rank_of(const Fiber& fiber) { return fiber.agent ? fiber.agent->rank : fiber.block->grid->launch.rank; }

Scheduler* const Scheduler::instance = tsan::as(tsan::executor_fiber(), [] { return new Scheduler(); });

Scheduler::Scheduler() = default;

// The first function on the stack of every fiber. It never returns.
void fiber_main() {
    Scheduler& scheduler = Scheduler::get();
    Fiber* self = current;
    asan::finish_switch(nullptr, &scheduler.driver_stack_, &scheduler.driver_stack_size_);
    if (Agent* agent = self->agent) {
        agent->added.acquire();
        try {
            agent->body();
        } catch (const AgentStopped&) {
        } catch (const std::exception& error) {
            scheduler.fail(false, "agent " + agent->name + " threw: " + error.what());
        } catch (...) {
            scheduler.fail(false, "agent " + agent->name + " threw an unknown exception");
        }
        agent->ended.open();
    } else {
        Grid& grid = *self->block->grid;
        Stream& stream = *grid.stream;
        grid.args.launched().acquire();
        stream.ended(stream.kernels - 1).acquire();
        grid.launch.entry(grid.args.data());
        stream.ended(stream.kernels).release();
    }
    scheduler.suspend_for_good(State::kDone);
}

u64 Scheduler::launch(const Launch& launch) {
    auto [stream, serial] = streams.launch(launch);
    if (!stream.running && stream.pending.size() == 1) to_start_.push_back(&stream);
    kernels_++;
    progress_++;
    events_.add(static_cast<u64>(launch.rank) << 32 | static_cast<u32>(launch.stream - first_stream_));
    return serial;
}

bool Scheduler::finished(u64 serial) const {
    Stream& stream = streams.of_serial(serial);
    if (stream.finished.load(std::memory_order_acquire) < serial) return false;
    if (kTsan) stream.ended(stream.running ? stream.kernels - 1 : stream.kernels).acquire();
    return true;
}

Agent* Scheduler::add_agent(int rank, std::string name, std::function<void()> body) {
    agents_.push_back(std::make_unique<Agent>(++last_agent_, rank, std::move(name), std::move(body), fiber_main));
    agents_.back()->fiber.identity = ~(static_cast<u64>(last_agent_ - first_agent_) << 3);
    ready_.push(&agents_.back()->fiber);
    return agents_.back().get();
}

// Agents are sorted by id.
std::vector<std::unique_ptr<Agent>>::const_iterator Scheduler::place_of(int id) const {
    return std::partition_point(agents_.begin(), agents_.end(), [&](const auto& agent) { return agent->id < id; });
}

Agent* Scheduler::agent(int id) const {
    const auto found = place_of(id);
    return found != agents_.end() && (*found)->id == id ? found->get() : nullptr;
}

bool Scheduler::idle(const Agent& agent) const {
    if (agent.fiber.state != State::kPolling) return false;
    return !tsan::as(tsan::executor_fiber(), [&] { return agent.fiber.ready(agent.fiber.ready_argument); });
}

void Scheduler::stop(Agent& agent) {
    agent.stopping = true;
    agent.warp.frozen_until = 0;
    auto found = std::find(polling_.begin(), polling_.end(), &agent.fiber);
    if (found == polling_.end()) return;
    polling_.erase(found);
    ready_.push(&agent.fiber);
}

void Scheduler::remove(Agent& agent) {
    tsan::as(tsan::host_fiber, [&] { agent.ended.acquire(); });
    agents_.erase(place_of(agent.id));
}

void Scheduler::stop_all_agents() {
    for (auto& agent : agents_) stop(*agent);
    auto running = [](const std::unique_ptr<Agent>& agent) { return !agent->done; };
    while (std::any_of(agents_.begin(), agents_.end(), running) && run(1)) {
    }
    while (!agents_.empty()) remove(*agents_.back());
}

void Scheduler::start_launches() {
    for (Stream* stream : to_start_) {
        stream->start(fiber_main);
        fibers_ += stream->grid.size();
        peak_fibers_ = std::max(peak_fibers_, fibers_);
        const u64 kernel = StreamTable::number_of(stream->grid.serial) - first_launch_;
        for (size_t i = 0; i < stream->grid.size(); i++) {
            stream->grid.fibers[i].identity = kernel << 32 | i << 3;
            stream->grid.fibers[i].spent = 0;
            ready_.push(&stream->grid.fibers[i]);
        }
    }
    to_start_.clear();
}

[[gnu::always_inline]] inline Fiber* Scheduler::choose() {
    if (ready_.random()) return choose_random();
    if (ready_.turns() % kTurnsPerPoll == 0) poll_all();
    if (Fiber* fiber = ready_.pop()) return fiber;
    poll_all();
    return ready_.pop();
}

void Scheduler::poll_all() {
    if (polling_.empty()) return;
    const u64 now = clock.now();
    size_t kept = 0;
    for (Fiber* fiber : polling_) {
        if (may_proceed(fiber, now))
            ready_.push(fiber);
        else
            polling_[kept++] = fiber;
    }
    polling_.resize(kept);
}

Fiber* Scheduler::choose_random() {
    const u64 now = clock.now();
    auto take = [&](size_t i) -> Fiber* {
        Fiber* fiber = polling_[i];
        if (ready_.frozen(fiber) || !may_proceed(fiber, now)) return nullptr;
        polling_[i] = polling_.back();
        polling_.pop_back();
        return fiber;
    };
    do {
        if (!polling_.empty() && ready_.draw().one_in(4))
            if (Fiber* fiber = take(ready_.draw().below(polling_.size()))) return fiber;
        if (Fiber* fiber = ready_.pop()) return fiber;
        const size_t count = polling_.size();
        const size_t start = count ? ready_.draw().below(count) : 0;
        for (size_t i = 0; i < count; i++)
            if (Fiber* fiber = take((start + i) % count)) return fiber;
    } while (ready_.thaw_one(polling_));
    return nullptr;
}

// Evaluates the predicate on behalf of the fiber, which saves a switch. Under ThreadSanitizer the fiber must evaluate
// it itself, since what the predicate acquires orders the fiber.
bool Scheduler::may_proceed(Fiber* fiber, u64 now) {
    if (fiber->deadline <= now) return fiber->timed_out = true;
    if (fiber->looked_at == progress_) return false;
    if (kTsan) return true;
    show(*fiber);
    current = fiber;
    const bool ready = fiber->ready(fiber->ready_argument);
    current = nullptr;
    if (!ready) fiber->looked_at = progress_;
    return ready;
}

[[gnu::always_inline]] inline void Scheduler::settle(Fiber* fiber) {
    switch (fiber->state) {
        case State::kReady:
            ready_.push(fiber);
            break;
        case State::kPolling:
            polling_.push_back(fiber);
            break;
        case State::kDone:
            retire(fiber);
            break;
        case State::kBarrier:
        case State::kCollective:
        case State::kFailed:
            break;
    }
}

[[gnu::always_inline]] inline void Scheduler::resume(Fiber* fiber) {
    show(*fiber);
    current = fiber;
    memory_switches = ready_.random();
    switches_++;
    void* fake_stack = nullptr;
    asan::start_switch(&fake_stack, fiber->stack_low, fiber->stack_size);
    tsan::switch_to(fiber->tsan_fiber);
    context_switch(driver_, fiber->context);
    tsan::switch_to(tsan::executor_fiber());
    asan::finish_switch(fake_stack, nullptr, nullptr);
    memory_switches = false;
    current = nullptr;
    if (!std::exchange(fiber->woken_in_vain, false)) progress_++;
    events_.add(fiber->identity ^ static_cast<u64>(fiber->state));
    settle(fiber);
}

// One loop with everything inlined: after a switch of stacks every return is mispredicted, so there should be few.
u64 Scheduler::run(u64 most) {
    news_ = false;
    u64 turns = 0;
    while (turns < most && !news_ && !failure_) {
        if (!to_start_.empty()) start_launches();
        Fiber* fiber = choose();
        if (!fiber) break;
        resume(fiber);
        turns++;
    }
    return turns;
}

u64 Scheduler::earliest_deadline() const {
    u64 earliest = kForever;
    for (const Fiber* fiber : polling_) earliest = std::min(earliest, fiber->deadline);
    return earliest;
}

void Scheduler::fail(bool deadlock, std::string message) {
    if (!failure_) failure_ = Failure{deadlock, std::move(message)};
}

void Failure::raise() const {
    tsan::as(tsan::host_fiber, [] { Scheduler::get().abandoned.acquire(); });
    if (deadlock) throw DeadlockError(message);
    throw SimtError(message);
}

void Scheduler::abandon() {
    if (kTsan) {
        auto release = [&](const Fiber& fiber) { tsan::as(fiber.tsan_fiber, [&] { abandoned.release(); }); };
        streams.for_each([&](const Stream& stream) {
            if (!stream.running) return;
            for (size_t i = 0; i < stream.grid.size(); i++) release(stream.grid.fibers[i]);
        });
        for (const auto& agent : agents_) release(agent->fiber);
    }
    ready_.clear();
    polling_.clear();
    to_start_.clear();
    updated.clear();
    streams.for_each([](Stream& stream) { stream.abandon(); });
    agents_.clear();
    kernels_ = 0;
    fibers_ = 0;
    news_ = true;
    progress_++;
    failure_.reset();
}

void Scheduler::begin_recording() {
    events_ = EventHash();
    switches_ = peak_fibers_ = collectives = barriers = 0;
    first_launch_ = streams.launches();
    first_agent_ = last_agent_;
    first_stream_ = last_stream_;
}

WorldStats Scheduler::stats() const {
    WorldStats stats;
    stats.event_hash = events_.value();
    stats.switches = switches_;
    stats.launches = streams.launches() - first_launch_;
    stats.peak_fibers = peak_fibers_;
    stats.collectives = collectives;
    stats.barriers = barriers;
    return stats;
}

}  // namespace deep_ep::cpu
