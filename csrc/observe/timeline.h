// A record of when kernels ran, what their threads and the host waited for, and what software NICs did, for a timeline
// that a person looks at. Without a recording in progress, each hook costs one relaxed load.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "wire/types.h"

namespace deep_ep::observe::timeline {

enum class Kind : u8 {
    kKernel,    // from its start to its end
    kWait,      // of a thread of a kernel: `peer` ends it by raising `word`, in the memory of `rank`, to `value`
    kHostWait,  // of the host, which drives the kernels of a CPU meanwhile
    kPut,       // `rank` wrote `value` bytes at `word`, in the memory of `peer`
    kSignal,    // `rank` raised `word`, in the memory of `peer`, to `value`
};

struct Event {
    Kind kind;
    i32 rank;        // of the agent to which the event belongs
    i32 peer = -1;   // -1: none
    u32 stream = 0;  // of a kernel
    u32 block = 0;   // of a wait
    u32 thread = 0;  // within the block
    u64 begin = 0;   // by the clock of kernels
    u64 end = 0;
    u64 value = 0;
    const void* word = nullptr;
    const char* name = "";  // copied by add()
};

static_assert(sizeof(Event) == 64, "a recording of a million events takes 64 MB");

inline std::atomic<bool> recording{false};

// Begins a recording of at most `most` events; what comes later is counted, not kept. `now_ns`: the clock of kernels.
void start(size_t most, u64 (*now_ns)());
// Adds an event; does nothing without a recording. Any thread or fiber may call it.
void add(const Event& event);
// Takes the events of a rank out of the recording.
std::vector<Event> take(i32 rank);
// Returns how many events were not kept since the start.
u64 lost();
// Ends the recording, and drops what was not taken.
void stop();

inline bool on() { return recording.load(std::memory_order_relaxed); }
// The clock; 0 without a recording.
u64 now();

}  // namespace deep_ep::observe::timeline
