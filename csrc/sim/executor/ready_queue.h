// The fibers that can run, and the choice of the next one.
#pragma once

#include <algorithm>
#include <vector>

#include "sim/executor/executor.h"
#include "sim/executor/fiber.h"
#include "sim/executor/random.h"

namespace deep_ep::cpu {

// First come, first served; by time, the one that has spent least; or, with a seed, a random choice. A missing barrier
// shows only when one warp falls far behind the others, which a uniform choice hardly ever causes. Therefore a whole
// warp is frozen for a long time once in a while.
class ReadyQueue {
  public:
    void set_schedule(Schedule schedule);
    Schedule schedule() const { return schedule_; }
    bool random() const { return schedule_.seed != 0 && !by_time(); }
    bool by_time() const { return schedule_.by_time; }
    bool has_earlier(const Fiber& fiber) const { return !timed_.empty() && timed_.front().spent < fiber.spent; }
    Random& draw() { return draw_; }

    void push(Fiber* fiber);
    Fiber* pop();  // null if none is ready and awake
    bool frozen(const Fiber* fiber) const { return fiber->warp->frozen_until > turns_; }
    // Wakes one frozen warp, which may be one of `polling`. Returns false if there is none.
    bool thaw_one(const std::vector<Fiber*>& polling);
    void clear();
    u64 turns() const { return turns_; }

  private:
    // A fiber, and its place among those that have spent as much.
    struct Timed {
        double spent;
        u64 turn;
        Fiber* fiber;
        bool operator<(const Timed& other) const {  // the greatest of a heap is the earliest
            return spent != other.spent ? spent > other.spent : turn > other.turn;
        }
    };

    void wake_thawed();

    Schedule schedule_;
    Random draw_;
    u64 turns_ = 0;
    Fiber *head_ = nullptr, *tail_ = nullptr;  // first come, first served
    std::vector<Timed> timed_;                 // by time: a heap
    u64 pushed_ = 0;
    std::vector<Fiber*> awake_, asleep_;  // random
};

}  // namespace deep_ep::cpu
