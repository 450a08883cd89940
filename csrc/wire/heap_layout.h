// Where things lie in a rank's heap. All ranks of a Buffer have the same layout, so an offset means the same
// everywhere.
//
//   header | signal words | region 0 | ... | region D-1 | arena (outputs)
#pragma once

#include "wire/signals.h"
#include "wire/types.h"

namespace deep_ep::wire {

constexpr u64 kPage = 4096;
constexpr u32 kMostRanks = 64;   // a mask has a bit for each
constexpr u64 kPieceBytes = 16;  // granularity of rows and message parts: one vector access

constexpr u64 align_up(u64 value, u64 alignment) { return (value + alignment - 1) / alignment * alignment; }
constexpr u32 ceil_div(u32 value, u32 divisor) { return (value + divisor - 1) / divisor; }

// What a rank says when it recovers (P16); stored by that rank's host in every rank's heap, the mask first.
struct RecoveryWord {
    u64 mask;   // the ranks that it leaves out, a bit each
    u64 stage;  // how far it is; only grows
};

struct HeapHeader {
    u64 abort;                          // see abort_word(); any rank may store here, last wins
    u64 announcement;                   // see announcement(); this rank's kernels store, other ranks' hosts load
    u64 compiling;                      // not 0 while this rank's host makes kernels ready; other ranks' hosts load
    u64 left;                           // not 0 once this rank will store to no heap again; other ranks' hosts load
    RecoveryWord recovery[kMostRanks];  // by rank
    u8 reserved[kPage - 4 * sizeof(u64) - kMostRanks * sizeof(RecoveryWord)];
};
static_assert(sizeof(HeapHeader) == kPage, "the header takes one page");

struct HeapLayout {
    u32 ranks;
    u32 regions;
    u64 region_bytes;
    u64 arena_bytes;

    constexpr u64 words_offset() const { return sizeof(HeapHeader); }
    constexpr u64 words() const { return static_cast<u64>(regions) * kSignals * ranks; }
    constexpr u64 regions_offset() const { return align_up(words_offset() + words() * sizeof(u64), kPage); }
    constexpr u64 arena_offset() const { return regions_offset() + regions * region_bytes; }
    constexpr u64 bytes() const { return arena_offset() + arena_bytes; }

    constexpr u64 word_offset(u32 region, u32 kind, u32 source) const {
        return words_offset() + sizeof(u64) * word_index(region, kind, source, ranks);
    }
    constexpr u64 region_offset(u32 region) const { return regions_offset() + region * region_bytes; }
};

}  // namespace deep_ep::wire
