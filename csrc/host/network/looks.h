// How often a thread looks for what a network may have to do: all the time, and more rarely when there is nothing.
//
// Nothing wakes it: a kernel in a graph that is replayed leaves a command without any host's call, and of libfabric's
// completion queues some have no descriptor to sleep on, and some one that is always readable. So sleep is a long nap,
// and what comes meanwhile waits for its end.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace deep_ep::host {

class Looks {
  public:
    static constexpr auto kNap = std::chrono::microseconds(20), kLongNap = std::chrono::microseconds(1000);
    static constexpr auto kSleep = std::chrono::milliseconds(10);

    // After a look, which has found something or not: gives the core away where it has not. `may_sleep`: nothing is
    // under way. A thread sleeps when it has looked in vain for a second, which its long naps make.
    void note(bool found, bool may_sleep = false) {
        in_vain_ = found ? 0 : std::min(in_vain_ + 1, may_sleep ? kSecond : kMany);
        if (in_vain_ == kSecond) {
            std::this_thread::sleep_for(kSleep);
        } else if (in_vain_ > kSome) {
            std::this_thread::sleep_for(in_vain_ < kMany ? kNap : kLongNap);
        } else if (in_vain_ != 0) {
            sched_yield();
        }
    }

  private:
    static constexpr int kSome = 200, kMany = kSome + 100, kSecond = kMany + std::chrono::seconds(1) / kLongNap;
    int in_vain_ = 0;
};

}  // namespace deep_ep::host
