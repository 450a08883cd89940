// The layout of a rank's heap. It is the same on all ranks of a Buffer, so an offset has the same meaning everywhere.
//
//   control pages | bank 0 | bank 1 | scratch | region 0 | ... | region D-1 | arena (outputs)
//
// A heap has two parts, which coincide where all ranks are mapped or a NIC reaches GPU memory. Otherwise the near part
// is an allocation of its own, in memory of the rank's GPU, with the layout of the heap up to the scratch, of which the
// abort words and the banks are used. Only kernels of ranks that map it, and hosts that reach it, access it. The far
// part is where NICs and proxies reach it, which may be pinned host memory. There a read-modify-write by a GPU and a
// store by a host are not atomic with respect to each other: a kernel's last look would write back the value from
// before a host's store, and a failure would be lost (P15). Hosts that cannot reach the near part store failures in the
// far part's abort words, and this rank's host relays them; the far part's banks have the words of wire/far_words.h.
//
// The control pages (header, recovery words and masks) hold what hosts exchange and what kernels report about failures;
// no put targets them. A bank holds the signal words of one generation of operations. Adjacent generations use
// different banks and abort words, so a store of the previous generation cannot erase a failure of this one. A recovery
// that follows a failed one may clear the bank of the old generation; an abort word, which stops the kernels of its
// generation, is never cleared (P15, P16).
#pragma once

#include "wire/masked_ranks.h"
#include "wire/signals.h"
#include "wire/types.h"

namespace deep_ep::wire {

constexpr u64 kPage = 4096;
constexpr u64 kPieceBytes = 16;  // granularity of rows and message parts: one vector access

constexpr u64 align_up(u64 value, u64 alignment) { return (value + alignment - 1) / alignment * alignment; }
constexpr u32 ceil_div(u32 value, u32 divisor) { return (value + divisor - 1) / divisor; }

// Announces the recovery of a rank (P16). That rank's host stores it in every rank's heap, the mask first.
struct RecoveryWord {
    RankMask mask;  // the ranks that it leaves out
    u64 stage;      // its progress; only grows
};

// The address of a rank's network endpoint. That rank's host stores it; hosts of other ranks load it.
struct NetworkAddress {
    static constexpr u64 kBytes = 1016;
    u64 generation;  // generation of the endpoint; stored last
    u8 bytes[kBytes];
};
static_assert(sizeof(NetworkAddress) == 1024, "a quarter of a page");

constexpr u32 kBanks = 2;
constexpr u64 kLine = 128;  // two cache lines of a CPU, one of a GPU

// On cache lines of its own, since every wait polls it.
struct alignas(kLine) AbortWord {
    u64 value;  // see abort_word(); any rank may store one here by an exchange, and the last one wins
};
static_assert(sizeof(AbortWord) == kLine, "the abort word has its lines to itself");

struct HeapHeader {
    u64 announcement;         // see announcement(); stored by this rank's kernels, loaded by other ranks' hosts
    u64 compiling;            // nonzero while this rank's host prepares kernels; loaded by other ranks' hosts
    u64 left;                 // nonzero once this rank will store to no heap again; loaded by other ranks' hosts
    u64 waiting;              // see waiting_word(); stored by this rank's kernels, loaded by other ranks' hosts
    u64 mail;                 // changes when another rank's host has stored its mask here; loaded by this rank's host
    AbortWord abort[kBanks];  // by generation
    MaskedRanks masked;

    constexpr u64& abort_of(u32 generation) { return abort[generation % kBanks].value; }
};
static_assert(sizeof(HeapHeader) == (1 + kBanks) * kLine + sizeof(MaskedRanks), "header");

// Bounds the number of operations in progress at once (P2).
constexpr u32 kMaxRegions = 16;

struct HeapLayout {
    u32 ranks;
    u32 regions;
    u64 region_bytes;
    u64 arena_bytes;

    constexpr u64 words() const { return static_cast<u64>(regions) * kSignals * ranks; }
    constexpr u64 bank_bytes() const { return align_up(words() * sizeof(u64), kLine); }
    // The RecoveryWord of a rank.
    constexpr u64 recovery_offset(u32 rank) const { return sizeof(HeapHeader) + rank * sizeof(RecoveryWord); }
    // The mask of `rank` in a generation. That rank's host stores it in every rank's heap.
    constexpr u64 mask_offset(u32 generation, u32 rank) const {
        return recovery_offset(ranks) + (static_cast<u64>(generation % kBanks) * ranks + rank) * sizeof(RankMask);
    }
    constexpr u64 address_offset() const { return align_up(mask_offset(kBanks - 1, ranks), kLine); }
    constexpr u64 control_bytes() const { return align_up(address_offset() + sizeof(NetworkAddress), kPage); }
    constexpr u64 bank_offset(u32 generation) const { return control_bytes() + generation % kBanks * bank_bytes(); }
    // Pieces that are never read: networks write there if a message must carry a payload. One for each writing rank.
    constexpr u64 scratch_offset() const { return align_up(bank_offset(0) + kBanks * bank_bytes(), kPage); }
    constexpr u64 near_bytes() const { return scratch_offset(); }
    constexpr u64 scratch_of(u32 rank) const { return scratch_offset() + rank * kPieceBytes; }
    constexpr u64 regions_offset() const { return align_up(scratch_of(ranks), kPage); }
    constexpr u64 arena_offset() const { return regions_offset() + regions * region_bytes; }
    constexpr u64 bytes() const { return arena_offset() + arena_bytes; }

    // Offset of a signal word in its bank.
    constexpr u64 word_in_bank(u32 region, u32 kind, u32 source) const {
        return sizeof(u64) * word_index(region, kind, source, ranks);
    }
    constexpr u64 region_offset(u32 region) const { return regions_offset() + region * region_bytes; }
};

}  // namespace deep_ep::wire
