// A lock and a gate for host threads, built on futexes. Not std::mutex: ThreadSanitizer intercepts it, and would take
// every hand-over inside the executor for a happens-before edge that the kernels under test could rely on.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include <ctime>
#include "sim/executor/sanitizers.h"

namespace deep_ep::cpu {

// Sleeps while the word has the expected value, for at most `limit` if given.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, const timespec* limit = nullptr) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, limit, nullptr, 0);
}
inline void futex_wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// Guards the executor; its holder runs in the executor's own context. The driving thread holds it for long stretches
// and checks from time to time whether another thread wants it.
class Lock {
  public:
    void lock() {
        uint32_t free = 0;
        if (!state_.compare_exchange_strong(free, 1, std::memory_order_acquire)) {
            knocking_.fetch_add(1, std::memory_order_relaxed);
            while (state_.exchange(2, std::memory_order_acquire) != 0) futex_wait(state_, 2);
            knocking_.fetch_sub(1, std::memory_order_relaxed);
        }
        tsan::host_fiber = tsan::current_fiber();
        tsan::switch_to(tsan::executor_fiber());
    }
    void unlock() {
        tsan::switch_to(tsan::host_fiber);
        if (state_.exchange(0, std::memory_order_release) == 2) futex_wake(state_, 1);
    }
    void let_others_in() {
        if (knocking_.load(std::memory_order_relaxed) == 0) return;
        unlock();
        while (knocking_.load(std::memory_order_relaxed) != 0) sched_yield();
        lock();
    }

  private:
    std::atomic<uint32_t> state_{0};  // 0: free, 1: held, 2: held and a thread may be sleeping
    std::atomic<uint32_t> knocking_{0};
};

// One thread sleeps until another opens the gate; passing closes it.
class Gate {
  public:
    void open() {
        open_.store(1, std::memory_order_release);
        futex_wake(open_, INT_MAX);
    }
    void pass() {
        while (open_.exchange(0, std::memory_order_acquire) == 0) futex_wait(open_, 0);
    }
    // The same, but returns after this time at the latest, and may return earlier.
    void pass_within(uint64_t nanoseconds) {
        if (open_.exchange(0, std::memory_order_acquire) != 0) return;
        const timespec limit = {static_cast<time_t>(nanoseconds / 1000000000u),
                                static_cast<long>(nanoseconds % 1000000000u)};
        futex_wait(open_, 0, &limit);
        open_.exchange(0, std::memory_order_acquire);
    }

  private:
    std::atomic<uint32_t> open_{0};
};

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace deep_ep::cpu
