// How long one thread waits for another rank. Where ranks are masked (P17), it reports to its host from time to time,
// which masks that rank or finds that it has an excuse. Otherwise the wait times out by itself.
#pragma once

#include "fabric/fabric.h"
#include "kernels/common/context.h"
#include "wire/masked_ranks.h"

namespace deep_ep {

class Patience {
  public:
    // `peer` is -1 for a wait that is not for another rank, which no mask ends.
    DEEP_EP_DEVICE Patience(const Environment& environment, wire::Phase phase, i32 peer, u64 timeout_ns)
        : environment_(environment), timeout_ns_(timeout_ns), peer_(peer), for_free_(phase == wire::Phase::kFree) {
        if (asks()) masks_seen_ = count();
        deadline_ = device::now_ns() + (asks() ? wire::step_ns(0, timeout_ns) : wire::patience_ns(phase, timeout_ns));
    }

    DEEP_EP_DEVICE u64 deadline() const { return deadline_; }

    // Called when the deadline has passed. Returns true if the wait continues, until the next deadline.
    DEEP_EP_DEVICE bool extend() { return asks() && tell(); }

    // The wait has ended.
    DEEP_EP_DEVICE void end(bool arrived) {
        if (suspected_) withdraw(arrived);
    }

  private:
    DEEP_EP_DEVICE bool asks() const { return environment_.suspects != nullptr && peer_ >= 0; }
    DEEP_EP_DEVICE wire::HeapHeader* header() const {
        return reinterpret_cast<wire::HeapHeader*>(environment_.peers.local);
    }
    // Stored by this rank's host; nothing else must be visible with it here.
    DEEP_EP_DEVICE u64 count() const { return device::load_relaxed<Scope::kSystem>(&header()->masked.count); }

    // This rank's host loads `suspects` and other ranks' hosts load `waiting`. Each word stands on its own, so no order
    // is needed. Of several threads that wait for the same rank, the longest wait is reported.
    DEEP_EP_DEVICE_CALL bool tell() {
        const u64 now = count();
        // The other ranks have been waiting for the masked rank, as this thread has been for them.
        steps_ = now == masks_seen_ ? steps_ + 1 : 0;
        masks_seen_ = now;
        deadline_ = device::now_ns() + wire::step_ns(steps_, timeout_ns_);
        if (steps_ == 0) return true;
        u64* const suspect = environment_.suspects + peer_;
        suspected_ = true;
        if (device::load_relaxed<Scope::kSystem>(suspect) < steps_) {
            device::store_relaxed<Scope::kSystem>(suspect, steps_);
        }
        const i32 other = wire::waited_for(device::load_relaxed<Scope::kSystem>(&header()->waiting));
        if (other < 0 || other >= peer_) {
            told_ = wire::waiting_word(static_cast<u32>(peer_), for_free_, steps_);
            device::store_relaxed<Scope::kSystem>(&header()->waiting, told_);
        }
        return steps_ < wire::kUnanswered;
    }
    DEEP_EP_DEVICE_CALL void withdraw(bool arrived) {
        // A word of another thread stays; that thread reports its own wait at its next step.
        if (told_ != 0) device::cas_relaxed<Scope::kSystem>(&header()->waiting, told_, u64{0});
        if (arrived) device::store_relaxed<Scope::kSystem>(environment_.suspects + peer_, u64{0});
    }

    const Environment& environment_;
    const u64 timeout_ns_;
    const i32 peer_;
    const bool for_free_;
    bool suspected_ = false;  // this thread has stored in `suspects`
    u64 steps_ = 0;
    u64 told_ = 0;  // the last word this thread has stored in `waiting`
    u64 masks_seen_ = 0;
    u64 deadline_;
};

}  // namespace deep_ep
