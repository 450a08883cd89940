// The machine's clock, which all its processes and Python's time.monotonic_ns() share.
#pragma once

#include <chrono>

#include "wire/types.h"

namespace deep_ep::observe {

inline u64 monotonic_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<u64>(std::chrono::nanoseconds(now).count());
}

}  // namespace deep_ep::observe
