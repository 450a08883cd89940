// The clock and the bounded wait.
#pragma once

#include <type_traits>

#include "sim/executor/device_calls.h"
#include "wire/types.h"

namespace deep_ep::device {

struct WaitNote;

inline u64 now_ns() { return cpu::now_ns(); }

template <class Ready>
bool spin_until(Ready&& ready, u64 deadline_ns, const WaitNote* what, const char* file = __builtin_FILE(),
                int line = __builtin_LINE()) {
    using Function = std::remove_reference_t<Ready>;
    auto call = [](void* function) -> bool { return (*static_cast<Function*>(function))(); };
    void* const argument = const_cast<void*>(static_cast<const void*>(&ready));
    return cpu::wait_ready(call, argument, deadline_ns, what, "spin_until", {file, line});
}

// A check is cheap here, and rarely() must be part of the predicate: if a wait could end while no waiting thread's
// predicate is true, the executor would take it for stuck.
template <class Ready, class Rarely>
bool spin_until(Ready&& ready, Rarely&& rarely, u64 deadline_ns, const WaitNote* what,
                const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return spin_until([&] { return ready() || rarely(); }, deadline_ns, what, file, line);
}

}  // namespace deep_ep::device
