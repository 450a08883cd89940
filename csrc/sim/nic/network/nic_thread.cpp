#include "sim/nic/network/nic_thread.h"

#include <algorithm>
#include <random>

#include "host/network/looks.h"
#include "observe/clock.h"
#include "sim/executor/executor.h"

namespace deep_ep::host {
namespace {

// Per queue pair in one turn. Bounded because kernels wait meanwhile.
constexpr int kMaxSteps = 64;

nic::SendQueue::Random random_of(int rank) {
    const auto random = std::make_shared<std::mt19937>(static_cast<u32>(rank));
    return [random](u32 bound) { return static_cast<u32>((*random)() % bound); };
}

}  // namespace

NicThread::NicThread(const NetworkPlace& place)
    : NicQueuePairs(place, random_of(place.rank), observe::monotonic_ns),
      kernels_on_cpu_(place.kernels_on_cpu),
      thread_([this] { kernels_on_cpu_ ? run_when_left_alone() : run(); }) {
    if (!kernels_on_cpu_) return;
    const auto leave = [this] {
        if (is_left()) left_alone_.open();
    };
    helper_ = cpu::Executor::get().add_helper({[this] { return serve(); }, leave});
}

NicThread::~NicThread() {
    if (kernels_on_cpu_) cpu::Executor::get().remove_helper(helper_);
    stopping_.store(true);
    left_alone_.open();
    thread_.join();
}

void NicThread::run() {
    Looks looks;
    while (!stopping_.load(std::memory_order_relaxed)) looks.note(serve());
}

// Only kernels post, and only while a thread runs them.
void NicThread::run_when_left_alone() {
    while (!stopping_.load(std::memory_order_relaxed)) {
        left_alone_.pass();
        while (!stopping_.load(std::memory_order_relaxed) && serve()) {
        }
    }
}

bool NicThread::serve() {
    const std::unique_lock<std::mutex> lock(serving_, std::try_to_lock);
    if (!lock.owns_lock() || refused_) return false;
    bool worked = false;
    try {
        for (nic::SendQueue* queue : served()) {
            for (int steps = 0; steps < kMaxSteps && queue->has_work(); ++steps) {
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
        // Kernels are notified as for any error, and end; refusal() then says what it was.
        for (nic::SendQueue* queue : served()) queue->fail(wire::mlx5::kLocalOperation);
    }
    return worked;
}

// A thread that is serving now may have polled a queue pair before its last doorbell.
bool NicThread::is_left() {
    const std::unique_lock<std::mutex> lock(serving_, std::try_to_lock);
    if (!lock.owns_lock()) return true;
    const auto& queues = served();
    return !refused_ && std::any_of(queues.begin(), queues.end(), [](const auto* queue) { return queue->has_work(); });
}

std::string NicThread::refusal() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return refusal_;
}

}  // namespace deep_ep::host
