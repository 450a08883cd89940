// The executor as seen by a CUDA thread or an agent; called by sim/device. It is the only header of this directory that
// instrumented code includes, and it exposes no structure of the scheduler, so that no sanitizer sees accesses to one.
#pragma once

#include <cstddef>
#include <type_traits>

#include "sim/executor/config.h"
#include "wire/types.h"

namespace deep_ep::device {
struct WaitNote;
}

namespace deep_ep::cpu {

// A line of the kernel's source, for dumps and messages.
struct Site {
    const char* file;
    int line;
};

constexpr u64 kForever = ~u64{0};

enum class Collective : u8 { kSyncWarp, kShuffle, kBallot, kAny, kAll };

// True while memory operations are switch points: in a random schedule, and not inside a predicate.
extern bool memory_switches;

// Another thread may run before the caller's next step.
void switch_point(Site site);

// Says how much time the caller has spent. Where threads are scheduled by time, one that has spent less goes first.
void spend(double cycles);

// Suspends the caller until ready(argument) is true or the clock has passed the deadline; returns whether it is ready.
// The scheduler may call `ready` on behalf of the caller, so it must only look (and note what it has seen).
bool wait_ready(bool (*ready)(void*), void* argument, u64 deadline_ns, const device::WaitNote* note, const char* what,
                Site site);

// Named barrier `id`. threads == 0: all threads of the block that have not exited (__syncthreads). Returns to all of
// them whether any has passed true.
bool barrier(unsigned id, unsigned threads, bool value, Site site);

// All lanes of `mask` meet. Returns the lane's result: for a shuffle the value of lane `source`, for a vote the vote.
u64 collective(Collective operation, u32 mask, u64 value, unsigned source, Site site);

// The block's shared memory: its dynamic part, and the static variable identified by `key`.
void* dynamic_shared();
void* static_shared(const void* key, size_t bytes, size_t alignment, Site site);

// Checks an access with a scope narrower than system: memory that other ranks, hosts or NICs access needs system scope.
void check_scope(const void* address, Site site);

// Checks an addition whose result is not asked for: a GPU's instruction names the state space of the word.
void check_space(const void* address, bool in_shared, Site site);

// Whether a GPU would reach this address in host memory, so that hosts' stores can come between the read and the write
// of a read-modify-write. If so, no other kernel updates it until end_update().
bool begin_update(const void* address, Site site);
void end_update(const void* address);

u64 now_ns();

// Ends everything with a SimtError that names the rule that the caller has broken.
[[noreturn]] void refuse(const char* rule, Site site);

// Lets all other ready fibers run first.
void yield(const char* file = __builtin_FILE(), int line = __builtin_LINE());

// For agents: suspends the caller until ready() is true or the deadline has passed; returns whether it is ready.
template <class Ready>
bool wait_until(Ready&& ready, const char* what, u64 deadline_ns = kForever, const char* file = __builtin_FILE(),
                int line = __builtin_LINE()) {
    using Function = std::remove_reference_t<Ready>;
    auto call = [](void* function) -> bool { return (*static_cast<Function*>(function))(); };
    void* const argument = const_cast<void*>(static_cast<const void*>(&ready));
    return wait_ready(call, argument, deadline_ns, nullptr, what, Site{file, line});
}

}  // namespace deep_ep::cpu
