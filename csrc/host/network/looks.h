// How often a thread looks for what a network may have to do: all the time, and more rarely when there is nothing.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace deep_ep::host {

class Looks {
  public:
    static constexpr auto kNap = std::chrono::microseconds(20), kLongNap = std::chrono::microseconds(1000);

    // After a look, which has found something or not: gives the core away where it has not.
    void note(bool found) {
        in_vain_ = found ? 0 : std::min(in_vain_ + 1, kMany);
        if (in_vain_ > kSome) {
            std::this_thread::sleep_for(in_vain_ < kMany ? kNap : kLongNap);
        } else if (in_vain_ != 0) {
            sched_yield();
        }
    }

  private:
    static constexpr int kSome = 200, kMany = kSome + 100;
    int in_vain_ = 0;
};

}  // namespace deep_ep::host
