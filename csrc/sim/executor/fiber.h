// The data structures of a running kernel. Only the executor's own files include this.
#pragma once

#include <cstddef>

#include "sim/executor/context_switch.h"
#include "sim/executor/device_calls.h"
#include "sim/executor/sanitizers.h"

namespace deep_ep::cpu {

struct Grid;
struct Block;
struct Warp;
struct Agent;

enum class State : u8 { kReady, kPolling, kBarrier, kCollective, kDone, kFailed };

// A CUDA thread or an agent.
struct Fiber {
    Context context;
    char* stack_low = nullptr;
    size_t stack_size = 0;
    void* tsan_fiber = nullptr;
    void* asan_fake_stack = nullptr;

    Fiber* next = nullptr;  // in the one list it is on: ready, or waiting at a barrier
    Block* block = nullptr;
    Warp* warp = nullptr;
    Agent* agent = nullptr;  // null for a CUDA thread
    u32 thread = 0;          // index within the block
    u8 lane = 0;
    State state = State::kReady;
    u64 identity = 0;  // in the event hash: launch and thread; the low three bits are left for the state

    // What it waits for, or where it last yielded.
    const char* what = "start";
    Site site{};
    const device::WaitNote* note = nullptr;
    bool (*ready)(void*) = nullptr;
    void* ready_argument = nullptr;
    u64 deadline = kForever;
    bool timed_out = false;
    double spent = 0;            // as it has told spend()
    u64 looked_at = 0;           // the scheduler's progress when `ready` was last false
    bool woken_in_vain = false;  // it evaluated `ready` itself, which was false, so it has changed nothing
};

// A collective in which some lanes of `mask` wait for the others.
struct PendingCollective {
    u32 mask = 0, arrived = 0;
    Collective operation = Collective::kSyncWarp;
    Site opened_by{};
};

struct Warp {
    u32 live = 0;  // lanes that have not exited
    unsigned pending_count = 0;
    u64 frozen_until = 0;
    Fiber* lanes[kWarpWidth] = {};
    u64 values[kWarpWidth], results[kWarpWidth];
    u8 sources[kWarpWidth];
    PendingCollective pending[kWarpWidth];
    // [lowest lane of the mask][round parity]: a lane already in the next round must not leak into this one.
    tsan::SyncPoint sync[kTsan ? kWarpWidth : 1][2];
    u8 rounds[kWarpWidth] = {};
};

struct Barrier {
    unsigned arrived = 0;
    unsigned expected = 0;  // 0: all live threads
    Fiber* waiting = nullptr;
    Site opened_by{};
    unsigned rounds = 0;
    bool any[2] = {};         // [round parity] whether any thread has passed true
    tsan::SyncPoint sync[2];  // [round parity], as in Warp
};

// A static shared variable: its key, and its offset in the block's static shared memory.
struct StaticShared {
    const void* key;
    size_t offset;
};

struct Block {
    static constexpr unsigned kBarriers = 16;
    static constexpr unsigned kMaxStatics = 16;
    Grid* grid = nullptr;  // null for the block of an agent
    unsigned index = 0;
    unsigned live = 0;       // threads that have not exited
    char* shared = nullptr;  // the dynamic part, then the statics
    size_t statics_used = 0;
    unsigned statics = 0;
    StaticShared static_table[kMaxStatics];
    Barrier barriers[kBarriers];
};

}  // namespace deep_ep::cpu
