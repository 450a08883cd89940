// The clock and the bounded wait.
#pragma once

#include "device/cuda/qualifiers.h"
#include "wire/types.h"

namespace deep_ep::device {

struct WaitNote;

// Nanoseconds; the same on all SMs. Advances in steps of up to a microsecond.
DEEP_EP_DEVICE u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// Most waits end within a few polls. After that, the poller backs off, so that it does not take issue slots and
// bandwidth from the threads it waits for, and only then checks the clock. On a GPU nothing reads the note; the caller
// records a failed wait. `ready` appears here once and is not unrolled, since it is inlined into every wait of every
// kernel.
template <class Ready, class Rarely>
DEEP_EP_DEVICE bool spin_until(Ready&& ready, Rarely&& rarely, u64 deadline_ns, const WaitNote*) {
    constexpr u32 kEagerPolls = 256, kPauseNs = 64, kPollsPerRareOne = 1024;
#pragma unroll 1
    for (u32 polls = 0; !ready(); ++polls) {
        if (polls < kEagerPolls) continue;
        if (polls % kPollsPerRareOne == 0 && rarely()) return true;
        if (now_ns() >= deadline_ns) return false;
        asm volatile("nanosleep.u32 %0;" ::"r"(kPauseNs));
    }
    return true;
}

template <class Ready>
DEEP_EP_DEVICE bool spin_until(Ready&& ready, u64 deadline_ns, const WaitNote* what) {
    return spin_until(ready, [] { return false; }, deadline_ns, what);
}

}  // namespace deep_ep::device
