// Threads that meet at a barrier: each learns what all others had done before.
#pragma once

#include "ptx/order/clock.h"

namespace deep_ep::ptx {

// One after the other: all arrive before any leaves, and none arrives again before it has left.
class Meeting {
  public:
    // -> which of its meetings that is.
    u64 arrive(const Clock& clock) {
        clocks_[number_ % 2].join(clock);
        return number_;
    }
    void leave(u64 number, Clock& clock) {
        if (number == number_) clocks_[++number_ % 2] = {};  // the first to leave: later arrivals are for the next
        clock.join(clocks_[number % 2]);
    }

  private:
    u64 number_ = 0;
    Clock clocks_[2];
};

}  // namespace deep_ep::ptx
