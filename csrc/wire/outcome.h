// The results of an operation for its host, in host-visible memory: counts, and if it failed, the wait that ended it.
#pragma once

#include "wire/signals.h"
#include "wire/types.h"

namespace deep_ep::wire {

enum class Phase : u32 {
    kNone,
    kFree,
    kNotify,
    kOffer,
    kData,
    kRead,
    kChunk,
    kNext,
    kPost,
    kQuiet,
    kHeader,
    kMask,
    kBounds,
    kResults,
    kForwarded
};

// The timeout of a wait. A peer that gives no slot back, or forwards nothing, usually waits for a third rank itself.
// Waits for that third rank, which began at the same time, must time out first, so that it is the rank that is blamed.
constexpr u64 patience_ns(Phase phase, u64 timeout_ns) {
    const bool for_third = phase == Phase::kNext || phase == Phase::kForwarded;
    return for_third ? timeout_ns + timeout_ns / 8 : timeout_ns;
}

constexpr const char* phase_name(Phase phase) {
    switch (phase) {
        case Phase::kFree:
            return "region given back (free)";
        case Phase::kNotify:
            return "counts (notify)";
        case Phase::kOffer:
            return "offer of output or rows";
        case Phase::kData:
            return "rows stored (data)";
        case Phase::kRead:
            return "published rows read (read)";
        case Phase::kChunk:
            return "chunk arrived";
        case Phase::kNext:
            return "chunk slot given back (next)";
        case Phase::kPost:
            return "place in the send queue";
        case Phase::kQuiet:
            return "own sends completed";
        case Phase::kHeader:
            return "message header check";
        case Phase::kMask:
            return "ranks left out";
        case Phase::kBounds:
            return "bounds of sizes and offsets";
        case Phase::kResults:
            return "results arrived";
        case Phase::kForwarded:
            return "rows or sums forwarded";
        default:
            return "";
    }
}

// The mark contains the generation of the record: the record of a captured call outlives recoveries, and one of another
// generation is ignored.
constexpr u64 failure_mark(u32 generation, u32 reason) { return static_cast<u64>(generation) << 32 | reason; }
constexpr u32 mark_generation(u64 mark) { return static_cast<u32>(mark >> 32); }
constexpr u32 mark_reason(u64 mark) { return static_cast<u32>(mark); }

struct Failure {
    u64 mark;   // failure_mark(); set last
    u32 phase;  // wire::Phase
    i32 peer;   // the rank that was waited for; -1: none
    // If the reason is kAborted: the rank that failed first, its reason, and the rank that it blames (-1: none).
    i32 cause_rank;
    u32 cause;
    i32 cause_peer;
    u64 expected;
    u64 seen;
};

struct Outcome {
    u32 counts_ready;    // 1 once these counts, and those per expert, are valid
    i32 total_rows;      // rows that this rank receives
    i32 forwarded_rows;  // node rows that it forwards, in two-hop mode
    u32 launches_ended;  // the latest launch of the call whose blocks have all ended: see Operation::~Operation()
    u64 operation;       // the number of this operation
    Failure failure;
};

}  // namespace deep_ep::wire
