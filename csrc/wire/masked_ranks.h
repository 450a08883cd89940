// Ranks that are masked while operations continue (P17), with `enable_shrink`: a rank for which others have waited
// until they timed out, or whose process has ended, is neither sent to nor waited for any longer.
#pragma once

#include "wire/rank_mask.h"
#include "wire/types.h"

namespace deep_ep::wire {

// In a rank's heap. Its host stores it, its kernels poll it. Bits are only ever set; a recovery clears them.
struct MaskedRanks {
    RankMask ranks;
    u64 count;         // grows with every change, and is stored last: each change restarts the timeouts of waits
    u64 reserved[15];  // keeps other data off its cache lines
};
static_assert(sizeof(MaskedRanks) == 256, "whole lines");

// A rank's kernels report to its host, for each other rank, how long some thread has waited for it, in steps. The first
// step is short, for hosts that can detect the end of a process; the others are eighths of the timeout.
constexpr u64 kFirstStep = 100'000'000;  // ns, at most
constexpr u32 kStepsOfWait = 8;
constexpr u64 kSuspect = 1 + kStepsOfWait;  // a wait for it has timed out
// Too long, whatever the rank may itself wait for: a rank that was late by a whole timeout and then waited until it
// timed out has taken little more than two timeouts, and the rank that it waited for may have an excuse in turn.
constexpr u64 kInexcusable = kSuspect + 3 * kStepsOfWait;
constexpr u64 kUnanswered = kInexcusable + kStepsOfWait;  // this rank's host does not react: the call fails

constexpr u64 step_ns(u64 step, u64 timeout_ns) {
    const u64 eighth = timeout_ns / kStepsOfWait;
    return step == 0 && kFirstStep < eighth ? kFirstStep : eighth;
}

// A rank's kernels report to all hosts the lowest rank for which some thread has waited for at least the first step,
// whether it waits for its region (`free`), and for how many steps; 0: none. The word changes with every step.
constexpr u64 waiting_word(u32 peer, bool for_free, u64 steps) {
    return steps << 33 | static_cast<u64>(for_free) << 32 | (peer + 1);
}
constexpr i32 waited_for(u64 word) { return static_cast<i32>(static_cast<u32>(word)) - 1; }
constexpr bool waits_for_free(u64 word) { return (word >> 32 & 1) != 0; }
static_assert(waited_for(waiting_word(1023, true, 7)) == 1023 && waits_for_free(waiting_word(1, true, 7)) &&
                  !waits_for_free(waiting_word(1, false, 7)) && waited_for(0) == -1,
              "waiting word");

}  // namespace deep_ep::wire
