// The polling back-off of a network thread: it polls continuously while there is work, and less often when idle.
//
// Nothing can wake the thread: a kernel in a replayed graph leaves a command without any call by the host, and some of
// libfabric's completion queues have no descriptor to sleep on, while others have one that is always readable.
// Therefore sleeping is just a long nap, and work that arrives meanwhile waits until it ends.
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

    // Records the result of a poll, and yields the core if it found nothing. `may_sleep`: nothing is in flight. The
    // thread sleeps once it has found nothing for a second, as measured by its long naps.
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
