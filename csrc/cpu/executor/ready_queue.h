// The fibers that can run, and the choice among them.
#pragma once

#include <vector>

#include "cpu/executor/executor.h"
#include "cpu/executor/fiber.h"
#include "cpu/executor/random.h"

namespace deep_ep::cpu {

// First come, first served; or, with a seed, any. A uniform choice hardly ever lets one warp fall far behind the
// others, which is when a missing barrier shows: so now and then a whole warp is frozen for a long while.
class ReadyQueue {
  public:
    void set_schedule(Schedule schedule);
    Schedule schedule() const { return schedule_; }
    bool random() const { return schedule_.seed != 0; }
    Random& draw() { return draw_; }

    void push(Fiber* fiber);
    Fiber* pop();  // null when none is ready and awake
    bool frozen(const Fiber* fiber) const { return fiber->warp->frozen_until > turns_; }
    // Wakes one frozen warp, among those of `polling` too. False when there is none.
    bool thaw_one(const std::vector<Fiber*>& polling);
    void clear();
    u64 turns() const { return turns_; }

  private:
    void wake_thawed();

    Schedule schedule_;
    Random draw_;
    u64 turns_ = 0;
    Fiber *head_ = nullptr, *tail_ = nullptr;  // first come, first served
    std::vector<Fiber*> awake_, asleep_;       // random
};

}  // namespace deep_ep::cpu
