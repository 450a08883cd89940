#include "host/network/ibgda/nic_thread.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <random>

#include "cpu/executor/executor.h"

namespace deep_ep::host {
namespace {

// After so many looks in vain the thread sleeps between looks, and after more of them for longer.
constexpr int kIdleLooks = 200, kManyIdleLooks = kIdleLooks + 100;
constexpr auto kNap = std::chrono::microseconds(20), kLongNap = std::chrono::microseconds(1000);
// Of a queue pair in one turn: kernels wait meanwhile.
constexpr int kMostSteps = 64;

uint64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

nic::SendQueue::Random random_of(int rank) {
    const auto random = std::make_shared<std::mt19937>(static_cast<u32>(rank));
    return [random](u32 bound) { return static_cast<u32>((*random)() % bound); };
}

}  // namespace

NicThread::NicThread(const NetworkPlace& place)
    : SoftNic(place, random_of(place.rank), now_ns), kernels_on_cpu_(place.kernels_on_cpu), thread_([this] { run(); }) {
    // A forked child inherits the requests, which are not its to carry out.
    const auto help = [this, owner = getpid()] {
        helped_.fetch_add(1, std::memory_order_relaxed);  // run() looks; it orders nothing
        return getpid() == owner && serve();
    };
    if (kernels_on_cpu_) helper_ = cpu::Executor::get().add_helper(help);
}

NicThread::~NicThread() {
    if (kernels_on_cpu_) cpu::Executor::get().remove_helper(helper_);
    stopping_.store(true);
    thread_.join();
}

void NicThread::run() {
    int idle_looks = 0;
    uint64_t helped = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
        // Where a thread drives kernels it serves the NICs between their turns, and this one would only take its core.
        // Relaxed: what that thread has done is ordered by `serving_`.
        if (const uint64_t now = helped_.load(std::memory_order_relaxed); now != helped) {
            helped = now;
            idle_looks = kManyIdleLooks;
            std::this_thread::sleep_for(kLongNap);
            continue;
        }
        idle_looks = serve() ? 0 : std::min(idle_looks + 1, kManyIdleLooks);
        if (idle_looks > kIdleLooks) std::this_thread::sleep_for(idle_looks < kManyIdleLooks ? kNap : kLongNap);
    }
}

bool NicThread::serve() {
    const std::unique_lock<std::mutex> lock(serving_, std::try_to_lock);
    if (!lock.owns_lock() || refused_) return false;
    bool worked = false;
    try {
        for (nic::SendQueue* queue : served()) {
            for (int steps = 0; steps < kMostSteps && queue->has_work(); ++steps) {
                queue->step();
                worked = true;
            }
        }
    } catch (const std::exception& error) {
        refused_ = true;
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            refusal_ = error.what();
        }
        // Kernels are told of it as of any error, and end; then refusal() says what it was.
        for (nic::SendQueue* queue : served()) queue->fail(wire::mlx5::kLocalOperation);
    }
    return worked;
}

std::string NicThread::refusal() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return refusal_;
}

}  // namespace deep_ep::host
