// Code shared by the native programs: running ranks as threads of a world, and selecting a planted bug by name.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "device/device.h"
#include "sim/executor/executor.h"

namespace planted {

using namespace deep_ep;
using namespace deep_ep::device;
using cpu::Executor;

// The bug of a run, or "none". Kernels query theirs by name, so the clean and the broken kernel share one source.
inline std::string chosen_bug = "none";
inline bool bug(const char* name) { return chosen_bug == name; }

// The values were wrong: the bug is visible without a sanitizer.
struct WrongValue {
    std::string message;
};

inline void expect(bool holds, const std::string& message) {
    if (!holds) throw WrongValue{message};
}

// Whether the error merely says that other ranks have ended.
inline bool is_deadlock(const std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const cpu::DeadlockError&) {
        return true;
    } catch (...) {
        return false;
    }
}

// Runs body(rank) on a thread per rank, under the schedule of `seed`. An exception in a rank ends the world; ranks that
// wait for it then fail too.
inline void run_world(int ranks, uint64_t seed, const std::function<void(int)>& body) {
    Executor& executor = Executor::get();
    std::vector<std::exception_ptr> errors(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    executor.world_begin(ranks, {seed, 64});
    for (int rank = 0; rank < ranks; rank++) {
        threads.emplace_back([&, rank] {
            executor.world_enter(rank);
            try {
                body(rank);
            } catch (...) {
                errors[static_cast<size_t>(rank)] = std::current_exception();
            }
            executor.world_leave(rank);
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::exception_ptr cause;
    for (const std::exception_ptr& error : errors) {
        if (error && (!cause || (is_deadlock(cause) && !is_deadlock(error)))) cause = error;
    }
    executor.world_end(cause != nullptr);
    if (cause) std::rethrow_exception(cause);
}

template <class Args>
void launch(const char* name, int rank, unsigned blocks, unsigned warps, cpu::Entry entry, const Args& args) {
    Executor::get().launch({name, rank, 0, blocks, warps * kWarpSize, 0, entry, &args, sizeof(Args)});
}

}  // namespace planted
