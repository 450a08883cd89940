// State that outlives a call (Context) and state of one call (Ticket). Both are in device memory.
#pragma once

#include "fabric/peers.h"
#include "wire/audience.h"
#include "wire/outcome.h"

namespace deep_ep {

using device::Scope;

// Generation and number of the next operation, packed into one word so that a recovery publishes both, and with them
// the bank of words, in a single store (P16). Operation n is use n / D of region n mod D. The word stores these two
// instead of n because a division is slow on a GPU and everything a kernel reads first depends on it.
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
              "sequence: must fill one word, and a region index must fit its bits");
static_assert(Sequence::of(Sequence{kMaxGenerations - 1, (1ull << kUseBits) - 1, wire::kMaxRegions - 1}.word()).use ==
                      (1ull << kUseBits) - 1 &&
                  Sequence::of(Sequence{kMaxGenerations - 1, 0, 7}.word()).generation == kMaxGenerations - 1 &&
                  Sequence::of(Sequence{3, 5, 1}.next(2).word()).use == 6,
              "sequence: its parts must round-trip, and after the last region the use must increase by one");

// Ranks whose addresses each block keeps in its shared memory. More have theirs in device memory.
constexpr u32 kKeptRanks = 64;

// What all blocks of a kernel read. On entry each copies it to its shared memory: an acquire makes an SM forget what it
// has in its L1, so that every later access would go to the L2 again.
struct Environment {
    fabric::Peers peers;
    u64* base;                     // [heap.words()] how much of each of this rank's signal words earlier uses have
                                   // consumed (P7)
    fabric::Completion* farewell;  // puts that no operation waits for: the `free` words; host-visible
    wire::RankMask mask;           // ranks that are neither sent to nor waited for (P17)
    wire::Audience audience;       // which ranks give regions back to each other (P4)
    u32* slots_read;     // [regions, ranks, kSlots] rows already summed of the chunk in each slot; 0 between calls
    u64* suspects;       // host-visible, [ranks]: see wire/masked_ranks.h; null: a wait that times out fails all ranks
    u64* decisions;      // [regions, ranks]: see Operation::takes_part; null when `suspects` is
    u64* claimed;        // host-visible: abort word of the latest failure that a kernel of this Buffer has claimed
    u64* failures;       // failures of this rank's Buffers; each failed generation of a Buffer counts once
    u64 failures_known;  // number of these that no longer concern this Buffer
    u64 sequence;        // see above; the first kernel of an operation takes its number here (P1)
    u8* bases[kKeptRanks];  // what peers.base and peers.nears point to in a block's copy, if they are null here
    u8* nears[kKeptRanks];
};
static_assert(sizeof(Environment) % sizeof(u64) == 0, "threads copy it by words");

// One per Buffer. Kernels read it through a pointer, so that captured graphs see what changes (P16).
struct Context : Environment {
    u32 counted;  // latest generation of this Buffer that is counted in `failures`
};

// Whether kernels are compiled for Buffers that mask ranks (P17): by default they are.
#ifndef DEEP_EP_MAY_MASK
#define DEEP_EP_MAY_MASK 1
#endif
constexpr bool kMayMask = DEEP_EP_MAY_MASK != 0;

// Points at which the blocks of a kernel count their arrivals; the last to arrive continues alone.
enum Arrival : u32 { kStored, kSent, kArrivals };

// In Ticket::blocks_left: more than the blocks of any launch.
constexpr u32 kGaveUp = 1u << 16;

// One per call, or per call of a captured graph. The operation's first kernel stores the number here; its later kernels
// read it (P1). A successful operation leaves the ticket ready for the next one. What a failed operation leaves belongs
// to its generation and counts as clear in any other.
struct Ticket {
    u64 operation;
    u64 use;        // number of earlier uses of its region
    u64 arguments;  // hash of what all ranks must agree on; messages carry it
    u32 region;
    fabric::Completion completion;
    u32 failed;      // generation in which a block of this call has given up: its other blocks need not wait
    u32 claimed;     // generation in which a thread was the first to give up; that thread writes the record
    u32 generation;  // of the fields below and of `completion`; see Operation::renew_ticket
    u32 blocks_arrived[kArrivals];  // last-block counters
    u32 blocks_left;  // the same at the end of a kernel; those that gave up also count in units of kGaveUp
};

// Arguments of every kernel of an operation.
struct CallArgs {
    Context* context;
    Ticket* ticket;
    wire::Outcome* outcome;  // host-visible
    u64 timeout_ns;          // of each wait
    u32 launch;              // which launch of the call this is, from 1
    u64* stages;             // see StageNotes
};

}  // namespace deep_ep
