#include "host/network/proxy/thread.h"

#include <sched.h>

#include "host/network/looks.h"
#include "observe/clock.h"

namespace deep_ep::host::proxy {
namespace {

// From the failure of a link until it is reported, so that the end of the peer itself may be noticed first: by a file
// descriptor on this machine, or by a connection to another one, whose packets may need one retransmission. Where a
// host waits, it looks twice after the failure; the rest is for threads that a busy machine holds up.
constexpr u64 kPatience = 5 * kPeerLook, kPatienceAfar = 1'000'000'000;  // ns
static_assert(2 * kPeerLook < kPatience && kPatience < kPatienceAfar, "hosts look twice before the link is blamed");
u64 patience(const NetworkPlace& place) { return place.address.empty() ? kPatience : kPatienceAfar; }

// Best effort: the process may have been assigned other CPUs since they were chosen.
void run_on(const std::vector<int>& cpus) {
    if (cpus.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(static_cast<size_t>(cpu), &set);
    sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace

Thread::Thread(const NetworkPlace& place, std::unique_ptr<Transport> transport)
    : ProxyNetwork(place, std::move(transport), {observe::monotonic_ns, patience(place)}),
      thread_([this, cpus = place.cpus] { run(cpus); }) {}

Thread::~Thread() {
    stopping_.store(true);
    thread_.join();
}

void Thread::run(const std::vector<int>& cpus) {
    run_on(cpus);
    Looks looks;
    uint64_t helped = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
        // Another thread is serving; this one would only take its core away.
        if (const uint64_t now = helped_.load(std::memory_order_relaxed); now != helped) {
            helped = now;
            looks = {};
            std::this_thread::sleep_for(Looks::kLongNap);
            continue;
        }
        bool found = false, may_sleep = false;
        if (const std::unique_lock<std::mutex> lock(stepping_, std::try_to_lock); lock.owns_lock()) {
            found = progress_.step();
            may_sleep = !progress_.is_open();
        }
        looks.note(found, may_sleep);
    }
}

bool Thread::help() {
    helped_.fetch_add(1, std::memory_order_relaxed);  // run() reads it; needs no ordering
    const std::unique_lock<std::mutex> lock(stepping_, std::try_to_lock);
    return lock.owns_lock() && progress_.step();
}

int Thread::look_up_peers() {
    const std::lock_guard<std::mutex> lock(stepping_);
    return progress_.look_up_peers();
}

bool Thread::idle() const {
    if (progress_.idle()) return true;
    const std::lock_guard<std::mutex> lock(stepping_);
    return progress_.waits_for_gone_alone();
}

std::vector<nic::Counters> Thread::counters() const {
    const std::lock_guard<std::mutex> lock(stepping_);
    return progress_.counters();
}

}  // namespace deep_ep::host::proxy
