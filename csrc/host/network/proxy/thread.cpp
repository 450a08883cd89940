#include "host/network/proxy/thread.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "cpu/executor/executor.h"
#include "host/network/proxy/libfabric.h"

namespace deep_ep::host::proxy {
namespace {

// After so many looks in vain the thread sleeps between looks, and after more of them for longer.
constexpr int kIdleLooks = 200, kManyIdleLooks = kIdleLooks + 100;
constexpr auto kNap = std::chrono::microseconds(20), kLongNap = std::chrono::microseconds(1000);

constexpr u64 kPatience = 200'000'000;  // ns

u64 now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

}  // namespace

Thread::Thread(const NetworkPlace& place)
    : progress_(place, make_libfabric(place), {now_ns, kPatience}), thread_([this] { run(); }) {
    if (!place.kernels_on_cpu) return;
    const auto help = [this] {
        helped_.fetch_add(1, std::memory_order_relaxed);  // run() looks; it orders nothing
        return step();
    };
    helper_ = cpu::Executor::get().add_helper({help});
}

Thread::~Thread() {
    if (helper_ >= 0) cpu::Executor::get().remove_helper(helper_);
    stopping_.store(true);
    thread_.join();
}

void Thread::run() {
    int idle_looks = 0;
    uint64_t helped = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
        // Another thread serves: this one would only take its core.
        if (const uint64_t now = helped_.load(std::memory_order_relaxed); now != helped) {
            helped = now;
            idle_looks = 0;
            std::this_thread::sleep_for(kLongNap);
            continue;
        }
        idle_looks = step() ? 0 : std::min(idle_looks + 1, kManyIdleLooks);
        if (idle_looks > kIdleLooks)
            std::this_thread::sleep_for(idle_looks < kManyIdleLooks ? kNap : kLongNap);
        else if (idle_looks != 0)
            sched_yield();
    }
}

bool Thread::step() {
    const std::unique_lock<std::mutex> lock(stepping_, std::try_to_lock);
    return lock.owns_lock() && progress_.step();
}

std::vector<nic::Counters> Thread::counters() const {
    const std::lock_guard<std::mutex> lock(stepping_);
    return progress_.counters();
}

}  // namespace deep_ep::host::proxy
