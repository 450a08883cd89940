#include "sim/executor/ready_queue.h"

namespace deep_ep::cpu {

namespace {

constexpr u64 kLongestFreeze = 100000;  // turns
constexpr u64 kThawEvery = 64;

}  // namespace

void ReadyQueue::set_schedule(Schedule schedule) {
    std::vector<Fiber*> ready = std::move(awake_);
    ready.insert(ready.end(), asleep_.begin(), asleep_.end());
    for (Fiber* fiber = head_; fiber; fiber = fiber->next) ready.push_back(fiber);
    for (const Timed& timed : timed_) ready.push_back(timed.fiber);
    clear();
    schedule_ = schedule;
    draw_ = Random(schedule.seed);
    turns_ = 0;
    for (Fiber* fiber : ready) {
        fiber->warp->frozen_until = 0;
        push(fiber);
    }
}

void ReadyQueue::clear() {
    head_ = tail_ = nullptr;
    awake_.clear();
    asleep_.clear();
    timed_.clear();
}

void ReadyQueue::push(Fiber* fiber) {
    fiber->state = State::kReady;
    if (by_time()) {
        timed_.push_back({fiber->spent, ++pushed_, fiber});
        std::push_heap(timed_.begin(), timed_.end());
        return;
    }
    if (!random()) {
        fiber->next = nullptr;
        (tail_ ? tail_->next : head_) = fiber;
        tail_ = fiber;
        return;
    }
    if (schedule_.freeze && draw_.one_in(u64{schedule_.freeze} * kWarpWidth))
        fiber->warp->frozen_until = turns_ + 1 + draw_.below(kLongestFreeze);
    awake_.push_back(fiber);
}

Fiber* ReadyQueue::pop() {
    turns_++;
    if (by_time()) {
        if (timed_.empty()) return nullptr;
        std::pop_heap(timed_.begin(), timed_.end());
        Fiber* fiber = timed_.back().fiber;
        timed_.pop_back();
        return fiber;
    }
    if (!random()) {
        Fiber* fiber = head_;
        if (!fiber) return nullptr;
        head_ = fiber->next;
        if (!head_) tail_ = nullptr;
        return fiber;
    }
    if (turns_ % kThawEvery == 0) wake_thawed();
    while (!awake_.empty()) {
        const size_t i = draw_.below(awake_.size());
        Fiber* fiber = awake_[i];
        awake_[i] = awake_.back();
        awake_.pop_back();
        if (!frozen(fiber)) return fiber;
        asleep_.push_back(fiber);
    }
    return nullptr;
}

void ReadyQueue::wake_thawed() {
    for (size_t i = 0; i < asleep_.size();) {
        if (frozen(asleep_[i])) {
            i++;
            continue;
        }
        awake_.push_back(asleep_[i]);
        asleep_[i] = asleep_.back();
        asleep_.pop_back();
    }
}

bool ReadyQueue::thaw_one(const std::vector<Fiber*>& polling) {
    std::vector<Fiber*> candidates = asleep_;
    for (Fiber* fiber : polling)
        if (frozen(fiber)) candidates.push_back(fiber);
    if (candidates.empty()) return false;
    candidates[draw_.below(candidates.size())]->warp->frozen_until = 0;
    wake_thawed();
    return true;
}

}  // namespace deep_ep::cpu
