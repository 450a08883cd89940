// The clock and the bounded wait.
#pragma once

#include <type_traits>

#include "cpu/executor/device_calls.h"
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

}  // namespace deep_ep::device
