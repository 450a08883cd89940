// The clock that kernels and waits use.
#pragma once

#include "observe/clock.h"
#include "wire/types.h"

namespace deep_ep::cpu {

// Real time, or a world's virtual time, which stands still until nothing can run and then jumps to the next deadline.
class Clock {
  public:
    u64 now() const { return virtual_ ? time_ : observe::monotonic_ns(); }
    void make_virtual() {
        virtual_ = true;
        time_ = 1000000000;  // not 0, which may mean "never"
    }
    void make_real() { virtual_ = false; }
    void jump(u64 to) { time_ = to; }

  private:
    bool virtual_ = false;
    u64 time_ = 0;
};

}  // namespace deep_ep::cpu
