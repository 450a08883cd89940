// What outlives a call (Context) and what belongs to one call (Ticket). Both in device memory.
#pragma once

#include "fabric/peers.h"
#include "wire/audience.h"
#include "wire/outcome.h"

namespace deep_ep {

using device::Scope;

// Generation and number of the next operation in one word, so that a recovery publishes both, and with them the bank of
// words, in one store (P16). Operation n is use n / D of region n mod D; the word has these two instead of n, since a
// division takes long on a GPU and all that a kernel looks at first stands behind it.
constexpr u32 kUseBits = 40, kRegionBits = 4, kGenerationBits = 20;
constexpr u32 kMaxGenerations = 1u << kGenerationBits;
struct Sequence {
    u32 generation;
    u64 use;
    u32 region;

    constexpr u64 word() const { return u64{generation} << (kUseBits + kRegionBits) | use << kRegionBits | region; }
    static constexpr Sequence of(u64 word) {
        return {static_cast<u32>(word >> (kUseBits + kRegionBits)), word >> kRegionBits & ((1ull << kUseBits) - 1),
                static_cast<u32>(word) & ((1u << kRegionBits) - 1)};
    }
    constexpr Sequence next(u32 regions) const {
        return region + 1 == regions ? Sequence{generation, use + 1, 0} : Sequence{generation, use, region + 1};
    }
};
static_assert(kUseBits + kRegionBits + kGenerationBits == 64 && wire::kMaxRegions <= 1u << kRegionBits,
              "sequence: a word, and a region fits into its bits");
static_assert(Sequence::of(Sequence{kMaxGenerations - 1, (1ull << kUseBits) - 1, wire::kMaxRegions - 1}.word()).use ==
                      (1ull << kUseBits) - 1 &&
                  Sequence::of(Sequence{kMaxGenerations - 1, 0, 7}.word()).generation == kMaxGenerations - 1 &&
                  Sequence::of(Sequence{3, 5, 1}.next(2).word()).use == 6,
              "sequence: its parts come back, and the last region's next use is one more");

// One per Buffer. Kernels read it through a pointer, so that captured graphs see what changes (P16).
struct Context {
    fabric::Peers peers;
    u64 sequence;  // see above; the first kernel of an operation takes its number here (P1)
    u64* base;     // [heap.words()] what earlier uses have consumed of each of this rank's signal words (P7)
    fabric::Completion* farewell;  // puts that no operation waits for: the `free` words; host-visible
    wire::RankMask mask;           // ranks that are neither sent to nor waited for (P17)
    wire::Audience audience;       // which ranks give back regions to each other (P4)
    u32* slots_read;               // [regions, ranks, kSlots] of the chunk in each slot: rows summed, 0 between calls
    u64* suspects;                 // host-visible, [ranks]: wire/masked_ranks.h; null: a wait in vain fails all ranks
    u64* decisions;                // [regions, ranks] see Operation::takes_part; null as `suspects`
    u64* claimed;                  // host-visible: the abort word of the latest failure that a kernel here has claimed
    u64* failures;                 // of this rank's Buffers: each generation of one that has failed counts once
    u64 failures_known;            // how many of them no longer concern this Buffer
    u32 counted;                   // the latest generation of this Buffer that counts there
};

// Points at which the last block of a kernel goes on alone.
enum Meeting : u32 { kCounted, kStored, kSent, kFinished, kMeetings };

// One per call, or per call of a captured graph. The operation's first kernel leaves the number here, the later ones
// read it (P1). An operation that ends well leaves it fit for the next; what one that failed leaves is of its
// generation and counts as clear in any other.
struct Ticket {
    u64 operation;
    u64 use;        // how often its region has been used before
    u64 arguments;  // hash of what all ranks must agree on; messages carry it
    u32 region;
    fabric::Completion completion;
    u32 failed;      // the generation in which some block of this call has given up: its other blocks need not wait
    u32 claimed;     // the generation in which a thread has given up first; that thread writes the record
    u32 generation;  // of what follows and of `completion`; see Operation::renew_ticket
    u32 blocks_met[kMeetings];  // last-block counters
};

// What every kernel of an operation gets.
struct CallArgs {
    Context* context;
    Ticket* ticket;
    wire::Outcome* outcome;  // host-visible
    u64 timeout_ns;          // of each wait
};

}  // namespace deep_ep
