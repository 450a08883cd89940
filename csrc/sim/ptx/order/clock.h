// Happens-before between accesses: vector clocks over all actors.
#pragma once

#include <algorithm>
#include <vector>

#include "wire/types.h"

namespace deep_ep::ptx {

// A point in time of one actor.
struct Epoch {
    u32 actor;
    u32 time;
};

class Clock {
  public:
    u32 time_of(u32 actor) const { return actor < times_.size() ? times_[actor] : 0; }
    bool covers(Epoch moment) const { return moment.time <= time_of(moment.actor); }
    void set(u32 actor, u32 time) {
        if (actor >= times_.size()) times_.resize(actor + 1);
        times_[actor] = time;
    }
    void join(const Clock& other) {
        if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
        for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
    }

  private:
    std::vector<u32> times_;
};

}  // namespace deep_ep::ptx
