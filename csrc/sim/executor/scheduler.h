// Schedules fibers. It knows nothing of host threads: the holder of the executor's lock calls run().
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sim/executor/agents.h"
#include "sim/executor/clock.h"
#include "sim/executor/executor.h"
#include "sim/executor/fiber.h"
#include "sim/executor/memory_map.h"
#include "sim/executor/random.h"
#include "sim/executor/ready_queue.h"
#include "sim/executor/stream_table.h"

namespace deep_ep::cpu {

// The fiber that is running or whose predicate is being evaluated; null while the scheduler itself runs.
extern Fiber* current;

// The reason why everything stopped.
struct Failure {
    bool deadlock;  // otherwise a broken rule
    std::string message;
    [[noreturn]] void raise() const;
};

class Scheduler {
  public:
    static Scheduler& get() { return *instance; }

    u64 launch(const Launch& launch);
    bool finished(u64 serial) const;  // needs no lock
    Agent* add_agent(int rank, std::string name, std::function<void()> body);
    Agent* agent(int id) const;  // null once removed
    bool idle(const Agent& agent) const;
    void stop(Agent& agent);
    void remove(Agent& agent);  // after it is done
    void stop_all_agents();     // idle or not

    // Gives fibers at most `most` turns, and stops early when a kernel or an agent ends. Returns the number of turns;
    // 0: no fiber can run now.
    u64 run(u64 most);
    // Predicates are evaluated once per change of the world. This reports that something outside may have changed.
    void look_again() { progress_++; }
    bool kernels_running() const { return kernels_ != 0; }
    // All threads wait at barriers and collectives, which no thread of this process or another can end.
    bool stuck() const { return kernels_ != 0 && polling_.empty(); }
    u64 earliest_deadline() const;

    const std::optional<Failure>& failure() const { return failure_; }
    void fail(bool deadlock, std::string message);
    void abandon();  // drops all kernels and agents where they stand; forgets the failure
    // What abandoned fibers did happens before what a host thread does after it has learned of the failure.
    tsan::SyncPoint abandoned;

    // For fibers. The state in which a fiber suspends itself determines what happens to it next.
    void suspend(State state) {
        Fiber* self = current;
        self->state = state;
        asan::start_switch(&self->asan_fake_stack, driver_stack_, driver_stack_size_);
        context_switch(self->context, driver_);
        asan::finish_switch(self->asan_fake_stack, &driver_stack_, &driver_stack_size_);
    }
    [[noreturn]] void suspend_for_good(State state) {
        current->state = state;
        asan::start_switch(nullptr, driver_stack_, driver_stack_size_);
        context_switch(current->context, driver_);
        __builtin_unreachable();
    }
    template <class Visit>
    void make_ready(Visit for_each_fiber) {
        tsan::as(tsan::executor_fiber(), [&] { for_each_fiber([this](Fiber* fiber) { ready_.push(fiber); }); });
    }
    u64 progress() const { return progress_; }

    ReadyQueue& ready() { return ready_; }
    void begin_recording();
    int new_stream() { return ++last_stream_; }
    WorldStats stats() const;
    EventHash& events() { return events_; }

    Clock clock;
    MemoryMap memory;
    MemoryMap host_memory;
    std::vector<const void*> updated;  // words of host memory between the halves of a read-modify-write
    u64 collectives = 0, barriers = 0;

    StreamTable streams;
    const std::vector<std::unique_ptr<Agent>>& agents() const { return agents_; }

  private:
    std::vector<std::unique_ptr<Agent>>::const_iterator place_of(int id) const;
    static Scheduler* const instance;  // outlives all threads and static destructors
    Scheduler();
    void start_launches();
    Fiber* choose();
    Fiber* choose_random();
    void poll_all();
    bool may_proceed(Fiber* fiber, u64 now);
    void resume(Fiber* fiber);
    void settle(Fiber* fiber);
    void retire(Fiber* fiber);

    ReadyQueue ready_;
    std::vector<Fiber*> polling_;
    std::vector<Stream*> to_start_;
    std::vector<std::unique_ptr<Agent>> agents_;
    int last_agent_ = 0, first_agent_ = 0;  // first: since recording began
    int last_stream_ = 0, first_stream_ = 0;
    u64 first_launch_ = 0;
    size_t kernels_ = 0;  // running or pending
    u64 progress_ = 0;
    bool news_ = false;  // a kernel or an agent has ended
    std::optional<Failure> failure_;

    Context driver_;  // the driving host thread, while a fiber runs
    const void* driver_stack_ = nullptr;
    size_t driver_stack_size_ = 0;

    EventHash events_;
    u64 switches_ = 0, fibers_ = 0, peak_fibers_ = 0;

    friend void fiber_main();  // completes the switch that resume() began
};

int rank_of(const Fiber& fiber);

}  // namespace deep_ep::cpu
