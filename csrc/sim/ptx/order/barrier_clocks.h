// The clocks of threads that come to a barrier: each is ordered after what all others did before it.
#pragma once

#include "sim/ptx/order/clock.h"

namespace deep_ep::ptx {

// Rounds of the barrier follow each other: all threads arrive before any leaves, and none arrives again before it has
// left.
class BarrierClocks {
  public:
    // Returns the number of the round.
    u64 arrive(const Clock& clock) {
        clocks_[number_ % 2].join(clock);
        return number_;
    }
    void leave(u64 number, Clock& clock) {
        if (number == number_)
            clocks_[++number_ % 2] = {};  // the first to leave: later arrivals belong to the next one
        clock.join(clocks_[number % 2]);
    }

  private:
    u64 number_ = 0;
    Clock clocks_[2];
};

}  // namespace deep_ep::ptx
