#include "host/network/ibgda/nic_thread.h"

#include <chrono>
#include <random>

namespace deep_ep::host {
namespace {

constexpr auto kNap = std::chrono::microseconds(20);
constexpr int kIdleLooks = 200;  // before a nap

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
    : SoftNic(place, random_of(place.rank), now_ns), thread_([this] { serve(); }) {}

NicThread::~NicThread() {
    stopping_.store(true);
    thread_.join();
}

void NicThread::serve() {
    int idle_looks = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
        bool worked = false;
        try {
            for (nic::SendQueue* queue : served()) {
                if (!queue->has_work()) continue;
                queue->step();
                worked = true;
            }
        } catch (const std::exception& error) {
            {
                const std::lock_guard<std::mutex> guard(mutex_);
                refusal_ = error.what();
            }
            // Kernels are told of it as of any error, and end; then refusal() says what it was.
            for (nic::SendQueue* queue : served()) queue->fail(wire::mlx5::kLocalOperation);
            return;
        }
        idle_looks = worked ? 0 : idle_looks + 1;
        if (idle_looks > kIdleLooks) std::this_thread::sleep_for(kNap);
    }
}

std::string NicThread::refusal() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return refusal_;
}

}  // namespace deep_ep::host
