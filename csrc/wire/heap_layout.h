// Where things lie in a rank's heap. All ranks of a Buffer have the same layout, so an offset means the same
// everywhere.
//
//   header | recovery words | bank 0 | bank 1 | region 0 | ... | region D-1 | arena (outputs)
//
// A bank holds the words of one generation of operations: the abort word, then the signal words. Neighbouring
// generations use different banks, so a store of the generation before cannot erase a failure of this one. A recovery
// that follows one that failed may clear the bank of the old generation; its abort word, which keeps that generation's
// kernels away, is never cleared (P15, P16).
#pragma once

#include "wire/rank_mask.h"
#include "wire/signals.h"
#include "wire/types.h"

namespace deep_ep::wire {

constexpr u64 kPage = 4096;
constexpr u64 kPieceBytes = 16;  // granularity of rows and message parts: one vector access

constexpr u64 align_up(u64 value, u64 alignment) { return (value + alignment - 1) / alignment * alignment; }
constexpr u32 ceil_div(u32 value, u32 divisor) { return (value + divisor - 1) / divisor; }

// What a rank says when it recovers (P16); stored by that rank's host in every rank's heap, the mask first.
struct RecoveryWord {
    RankMask mask;  // the ranks that it leaves out
    u64 stage;      // how far it is; only grows
};

struct HeapHeader {
    u64 announcement;  // see announcement(); this rank's kernels store, other ranks' hosts load
    u64 compiling;     // not 0 while this rank's host makes kernels ready; other ranks' hosts load
    u64 left;          // not 0 once this rank will store to no heap again; other ranks' hosts load
    u64 reserved;
};
static_assert(sizeof(HeapHeader) == 32, "header");

constexpr u32 kBanks = 2;

// First in a bank. On lines of its own: every wait polls it, and peers store to the words behind it.
struct alignas(128) BankHeader {
    u64 abort;  // see abort_word(); any rank may exchange a value into it, the last one wins
};
static_assert(sizeof(BankHeader) == 128, "the abort word has its lines to itself");

struct HeapLayout {
    u32 ranks;
    u32 regions;
    u64 region_bytes;
    u64 arena_bytes;

    constexpr u64 words() const { return static_cast<u64>(regions) * kSignals * ranks; }
    constexpr u64 bank_bytes() const {
        return sizeof(BankHeader) + align_up(words() * sizeof(u64), sizeof(BankHeader));
    }
    // Of what a rank says when it recovers.
    constexpr u64 recovery_offset(u32 rank) const { return sizeof(HeapHeader) + rank * sizeof(RecoveryWord); }
    constexpr u64 bank_offset(u32 generation) const {
        return align_up(recovery_offset(ranks), kPage) + generation % kBanks * bank_bytes();
    }
    constexpr u64 regions_offset() const { return align_up(bank_offset(0) + kBanks * bank_bytes(), kPage); }
    constexpr u64 arena_offset() const { return regions_offset() + regions * region_bytes; }
    constexpr u64 bytes() const { return arena_offset() + arena_bytes; }

    // Of a signal word, from the beginning of its bank.
    constexpr u64 word_in_bank(u32 region, u32 kind, u32 source) const {
        return sizeof(BankHeader) + sizeof(u64) * word_index(region, kind, source, ranks);
    }
    constexpr u64 region_offset(u32 region) const { return regions_offset() + region * region_bytes; }
};

}  // namespace deep_ep::wire
