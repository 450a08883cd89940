// Signal words: 64-bit counters in the heap by which ranks notify each other of events (PROTOCOL P5 to P8).
//
// Every rank has, per region, one word for each (kind, slot, source). `source` is the only rank that ever writes the
// word, over whatever fabric connects it to this rank. Words of row streams are the exception: they are for rows that
// ranks of a node pass on to each other, and their source is the number of a row stream (docs/two_hops.md). In each
// operation one rank of the node writes such a word, always by loads and stores. The positions of words depend only on
// the numbers of ranks and regions, so kernels of any shape share them.
#pragma once

#include "wire/types.h"

namespace deep_ep::wire {

// The amount that one put adds to its signal word, however it is cut on the way (P8). A power of two, so that each
// piece of a put cut into up to kUnit pieces can add its share.
constexpr u64 kUnit = 1ull << 15;

// Chunk slots per row stream (a source and a destination). More slots hide more latency and take more heap.
constexpr u32 kSlots = 4;

// Words of a row stream inside a node: one for each role of a forwarder and each slot.
constexpr u32 kStreamWords = 4;

// Kinds of signal words. Those with slots take kSlots consecutive numbers.
enum Signal : u32 {
    kFree = 0,                  // source has given back its region; written at every rank (P4)
    kNotify = 1,                // source's row of counts, or its routing, has arrived
    kOffer = 2,                 // source's offer has arrived: where its output or its published rows are (P9, P12)
    kData = 3,                  // all rows of source are in this rank's output, or in its region
    kRead = 4,                  // source has read the rows that this rank published (P12)
    kChunk = 5,                 // slot s holds a chunk from source
    kNext = kChunk + kSlots,    // source has read slot s of the row stream to it: the next chunk may follow
    kOfRanks = kNext + kSlots,  // kinds below belong to ranks, those from here on to row streams
    kStreamChunk = kOfRanks,    // a chunk of the row stream has been passed on to this rank
    kStreamNext = kStreamChunk + kStreamWords,  // a chunk that this rank has passed on has been read
    kSignals = kStreamNext + kStreamWords
};

// A put adds one unit to a word, so a word lasts for 2^48 puts.
static_assert(~0ull / kUnit >= 1ull << 48, "limit of a signal word");

// Index of a word among a rank's signal words. `kind` includes the slot: kChunk + slot.
constexpr u32 word_index(u32 region, u32 kind, u32 source, u32 ranks) {
    return (region * kSignals + kind) * ranks + source;
}

// The abort word (P15). The upper half is the generation; the lower half has the reason, the peer concerned, and the
// rank that failed. Zero: nothing has failed.
enum Reason : u32 {
    kNoFailure = 0,
    kTimeout = 1,    // a wait timed out
    kAborted = 2,    // another rank failed first
    kMismatch = 3,   // a peer issued another operation, or the same with other arguments
    kException = 4,  // a rank's Python code raised an exception
    kOverflow = 5,   // a peer would receive more rows than all ranks had agreed on
    kNetwork = 6,    // the NIC has reported an error
    kDied = 7,       // a peer's process has ended in the middle of an operation
    kLeft = 8,       // a peer has destroyed its Buffer while others wait for it
    kElsewhere = 9,  // an operation of another Buffer of this rank has failed, whose results this one may use
    kMasked = 10,    // other ranks continue without this one (P17); only it is notified
    kOutdated = 11,  // a call was planned or captured when a rank took part that has since been left out
    kSilent = 12,    // nothing has arrived from a peer's machine for some time
    kUnheard = 13,   // a peer has heard nothing from this rank's machine, and continues without it
    // A dispatch was given ids and a layout of other ids. No peer is concerned. If the layout has no row for a choice,
    // the phase is kData, `expected` the token and `seen` the choice: rank << 32 | expert. If it has another count for
    // an expert, the phase is kNotify, `expected` the expert and `seen` both counts: that of the layout, in the 32 bits
    // of its i32, << 32 | that of the ids.
    kOtherIds = 14,
};

// What the failed rank has done, for messages: a verb, usually followed by the peer.
constexpr const char* reason_name(u32 reason) {
    switch (reason) {
        case kTimeout:
            return "waited too long for";
        case kMismatch:
            return "made a call that does not match that of";
        case kException:
            return "raised an exception";
        case kNetwork:
            return "was told by its NIC that it cannot send to";
        case kOverflow:
            return "saw more rows than there is room for at";
        case kMasked:
            return "has masked";
        case kOutdated:
            return "used a handle, or replayed a graph, from before it left out";
        case kElsewhere:
            return "had an operation fail on another of its Buffers, whose results this one may have been given";
        case kOtherIds:
            return "passed a layout to dispatch (num_tokens_per_expert, is_token_in_rank) that is not of its topk_idx";
        default:
            return "failed";
    }
}

constexpr u32 kAbortRankBits = 14;
constexpr u32 kAbortRanks = 1u << kAbortRankBits;
constexpr u32 kNoPeer = kAbortRanks - 1;

constexpr u64 abort_word(u32 generation, u32 reason, u32 rank, i32 peer) {
    return static_cast<u64>(generation) << 32 | static_cast<u64>(reason) << 2 * kAbortRankBits |
           (static_cast<u32>(peer) & kNoPeer) << kAbortRankBits | rank;
}
constexpr u32 abort_generation(u64 word) { return static_cast<u32>(word >> 32); }
constexpr u32 abort_reason(u64 word) { return static_cast<u32>(word) >> 2 * kAbortRankBits; }
constexpr u32 abort_rank(u64 word) { return static_cast<u32>(word) & (kAbortRanks - 1); }
// -1: no peer is concerned.
constexpr i32 abort_peer(u64 word) {
    const u32 peer = static_cast<u32>(word) >> kAbortRankBits & (kAbortRanks - 1);
    return peer == kNoPeer ? -1 : static_cast<i32>(peer);
}

static_assert(abort_rank(abort_word(7, kTimeout, 4095, 4094)) == 4095 &&
                  abort_peer(abort_word(7, kTimeout, 4095, 4094)) == 4094 &&
                  abort_peer(abort_word(7, kException, 0, -1)) == -1 &&
                  abort_reason(abort_word(7, kException, 4095, -1)) == kException &&
                  abort_generation(abort_word(7, kTimeout, 4095, 4094)) == 7,
              "abort word: 32-bit generation, 4-bit reason, ranks below 2^14 - 1");

// What a rank is doing: the number of the operation that it began last, its kind and a hash of its arguments. It is in
// the rank's own heap; a peer whose wait takes suspiciously long compares it with its own operation (P15). Zero:
// nothing yet.
enum class Kind : u32 { kNone, kDispatch, kCachedDispatch, kCombine, kLowLatencyDispatch, kLowLatencyCombine };

constexpr u64 announcement(u64 operation, Kind kind, u64 arguments) {
    return (operation + 1) << 24 | static_cast<u64>(kind) << 20 | (arguments & 0xfffff);
}
constexpr u64 announced_operation(u64 word) { return (word >> 24) - 1; }
constexpr Kind announced_kind(u64 word) { return static_cast<Kind>(word >> 20 & 0xf); }

static_assert(announced_operation(announcement((1ull << 40) - 2, Kind::kCombine, ~0ull)) == (1ull << 40) - 2 &&
                  announced_kind(announcement(5, Kind::kCombine, ~0ull)) == Kind::kCombine,
              "announcement: 40-bit operation, 4-bit kind, 20 bits of the arguments' hash");

constexpr const char* kind_name(Kind kind) {
    switch (kind) {
        case Kind::kDispatch:
            return "dispatch";
        case Kind::kCachedDispatch:
            return "cached dispatch";
        case Kind::kCombine:
            return "combine";
        case Kind::kLowLatencyDispatch:
            return "low-latency dispatch";
        case Kind::kLowLatencyCombine:
            return "low-latency combine";
        default:
            return "none";
    }
}

}  // namespace deep_ep::wire
