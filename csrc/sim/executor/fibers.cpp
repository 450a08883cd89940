// The executor as seen from a fiber: yielding, waiting, shared memory, failing.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "device/device.h"
#include "observe/timeline.h"
#include "sim/executor/misuse.h"
#include "sim/executor/scheduler.h"

namespace deep_ep::cpu {

namespace {

namespace timeline = observe::timeline;

// Records a wait of a kernel's thread that began at `begin`. The word is named only if it ended the wait, which a
// failure, a masked rank or another word may have done.
void record_wait(const Fiber& fiber, const device::WaitNote& note, u64 begin) {
    const Grid& grid = *fiber.block->grid;
    // Other ranks' kernels, hosts and NICs raise the word. Relaxed: the value only decides what the timeline says.
    const bool reached = note.word != nullptr && __atomic_load_n(note.word, __ATOMIC_RELAXED) >= note.expected;
    timeline::add({timeline::Kind::kWait, grid.launch.rank, note.peer, static_cast<u32>(grid.launch.stream),
                   fiber.block->index, fiber.thread, begin, Scheduler::get().clock.now(), note.expected,
                   reached ? note.word : nullptr, note.what});
}

constexpr u64 kSwitchOneIn = 4;  // in a random schedule, one memory operation in four lets other fibers run first

}  // namespace

void misuse(Site site, const char* rule, ...) {
    char text[512];
    va_list values;
    va_start(values, rule);
    std::vsnprintf(text, sizeof text, rule, values);
    va_end(values);
    Scheduler::get().fail(false, text + (" at " + to_string(site) + " (" + describe(*current) + ")"));
    Scheduler::get().suspend_for_good(State::kFailed);
}

void refuse(const char* rule, Site site) { misuse(site, "%s", rule); }

void yield(const char* file, int line) {
    Fiber* self = current;
    self->site = {file, line};
    self->what = "yielded";
    Scheduler::get().suspend(State::kReady);
}

void spend(double cycles) { current->spent = cycles; }

void switch_point(Site site) {
    const ReadyQueue& ready = Scheduler::get().ready();
    if (ready.by_time()) {
        if (ready.has_earlier(*current)) yield(site.file, site.line);
        return;
    }
    if (Scheduler::get().ready().draw().one_in(kSwitchOneIn)) yield(site.file, site.line);
}

u64 now_ns() { return Scheduler::get().clock.now(); }

bool wait_ready(bool (*ready)(void*), void* argument, u64 deadline_ns, const device::WaitNote* note, const char* what,
                Site site) {
    Scheduler& scheduler = Scheduler::get();
    Fiber* self = current;
    auto look = [&] {
        const bool switches = memory_switches;
        memory_switches = false;
        const bool result = ready(argument);
        memory_switches = switches;
        return result;
    };
    self->what = what;
    self->site = site;
    self->note = note;
    self->ready = ready;
    self->ready_argument = argument;
    self->deadline = deadline_ns;
    self->timed_out = false;
    bool result = true;
    const bool recorded = note != nullptr && !self->agent && timeline::on();
    const u64 begin = recorded ? scheduler.clock.now() : 0;
    while (!look()) {
        self->looked_at = scheduler.progress();
        if (self->timed_out || (deadline_ns != kForever && scheduler.clock.now() >= deadline_ns)) {
            result = false;
            break;
        }
        scheduler.suspend(State::kPolling);
        if (self->agent && self->agent->stopping) throw AgentStopped{};
        self->woken_in_vain = true;
    }
    if (recorded) record_wait(*self, *note, begin);
    self->woken_in_vain = false;
    self->note = nullptr;
    self->deadline = kForever;
    return result;
}

void* dynamic_shared() { return current->block->shared; }

void* static_shared(const void* key, size_t bytes, size_t alignment, Site site) {
    Block& block = *current->block;
    const size_t base = (block.grid->launch.shared_bytes + 127) & ~size_t{127};
    for (unsigned i = 0; i < block.statics; i++)
        if (block.static_table[i].key == key) return block.shared + base + block.static_table[i].offset;
    const size_t offset = (block.statics_used + alignment - 1) & ~(alignment - 1);
    if (block.statics == Block::kMaxStatics || offset + bytes > kMaxStaticShared)
        misuse(site, "more static shared memory than a block has");
    block.static_table[block.statics++] = {key, offset};
    block.statics_used = offset + bytes;
    void* const variable = block.shared + base + offset;
    // In the executor's context: the poison is not a write by the thread that happens to get here first.
    if (kExact) tsan::as(tsan::executor_fiber(), [&] { std::memset(variable, kPoison, bytes); });
    return variable;
}

bool begin_update(const void* address, Site site) {
    Scheduler& scheduler = Scheduler::get();
    if (!current || !scheduler.host_memory.has(address)) return false;
    const auto is_updated = [&] { return std::ranges::find(scheduler.updated, address) != scheduler.updated.end(); };
    while (is_updated()) yield(site.file, site.line);  // the fiber that updates it waits for nothing
    scheduler.updated.push_back(address);
    return true;
}

void end_update(const void* address) { std::erase(Scheduler::get().updated, address); }

void check_scope(const void* address, Site site) {
    if (current && Scheduler::get().memory.shared(address, rank_of(*current)))
        misuse(site, "an access to memory that others share needs Scope::kSystem");
}

void check_space(const void* address, bool in_shared, Site site) {
    if (!current || current->agent) return;
    const Block& block = *current->block;
    const auto* const word = static_cast<const char*>(address);
    const size_t bytes = ((block.grid->launch.shared_bytes + 127) & ~size_t{127}) + kMaxStaticShared;
    const bool is_shared = word >= block.shared && word < block.shared + bytes;
    if (is_shared == in_shared) return;
    misuse(site, in_shared ? "an addition at Scope::kBlock to a word that is not in shared memory"
                           : "an addition at a wider scope than kBlock to a word in shared memory");
}

}  // namespace deep_ep::cpu
