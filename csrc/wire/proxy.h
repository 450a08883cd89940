// Formats of the host proxy: the commands that kernels post for a thread of their host, and the immediate data that a
// network delivers with each message.
#pragma once

#include "wire/heap_layout.h"

namespace deep_ep::wire::proxy {

// --- commands
// -------------------------------------------------------------------------------------------------------------------

// A put is one command for each of its pieces, consecutive in the ring; the last one carries the signal.
enum Operation : u32 {
    kNothing = 0,
    kPart = 1,    // copy; more of the same put follows
    kLast = 2,    // copy, and signal when all of the put has arrived
    kSignal = 3,  // signal only
};

// Two words that are stored one after the other, the upper one last. Each has the lap bit of its position, so that a
// stale word is never taken for a new one. From bit 63 down:
//
//   low    lap 1 | operation 2 | length 24 | spare 1 | source 36
//   high   lap 1 | peer 12 | word 10 | spare 5 | target 36
//
// Length, source and target count kPieceBytes. Source and target are offsets in the sender's and the peer's heap.
struct Command {
    u64 low;
    u64 high;
};
static_assert(sizeof(Command) == 16, "two words");

constexpr u32 kLapShift = 63, kOperationShift = 61, kLengthShift = 37, kPeerShift = 51, kWordShift = 41;
constexpr u32 kPeerBits = 12, kWordBits = 10, kLengthBits = 24, kOffsetBits = 36;
static_assert(kLengthShift + kLengthBits == kOperationShift && kOffsetBits < kLengthShift, "low");
static_assert(kPeerShift + kPeerBits == kLapShift && kWordShift + kWordBits == kPeerShift && kOffsetBits < kWordShift,
              "high");
constexpr u64 kMaxCommandBytes = ((u64{1} << kLengthBits) - 1) * kPieceBytes;
constexpr u64 kMaxHeapBytes = (u64{1} << kOffsetBits) * kPieceBytes;
static_assert(kMaxCommandBytes >= (256ull << 20) - kPieceBytes && kMaxHeapBytes == 1ull << 40, "256 MiB, 1 TiB");
static_assert(1u << kPeerBits >= kMaxRanks && (1u << kPeerBits) >= 4096, "ranks");

constexpr u64 low_bits(u64 value, u32 bits) { return value & ((u64{1} << bits) - 1); }

constexpr u64 command_low(u64 lap, u32 operation, u64 bytes, u64 source) {
    return lap << kLapShift | static_cast<u64>(operation) << kOperationShift | bytes / kPieceBytes << kLengthShift |
           source / kPieceBytes;
}
constexpr u64 command_high(u64 lap, u32 peer, u32 word, u64 target) {
    return lap << kLapShift | static_cast<u64>(peer) << kPeerShift | static_cast<u64>(word) << kWordShift |
           target / kPieceBytes;
}
constexpr u64 lap_of(u64 half) { return half >> kLapShift; }
constexpr u32 operation_of(Command of) { return static_cast<u32>(low_bits(of.low >> kOperationShift, 2)); }
constexpr u64 bytes_of(Command of) { return low_bits(of.low >> kLengthShift, kLengthBits) * kPieceBytes; }
constexpr u64 source_of(Command of) { return low_bits(of.low, kOffsetBits) * kPieceBytes; }
constexpr u32 peer_of(Command of) { return static_cast<u32>(low_bits(of.high >> kPeerShift, kPeerBits)); }
constexpr u32 word_of(Command of) { return static_cast<u32>(low_bits(of.high >> kWordShift, kWordBits)); }
constexpr u64 target_of(Command of) { return low_bits(of.high, kOffsetBits) * kPieceBytes; }

constexpr Command kCommandOfLimits{command_low(1, kSignal, kMaxCommandBytes, kMaxHeapBytes - kPieceBytes),
                                   command_high(1, 4095, 1023, kMaxHeapBytes - kPieceBytes)};
static_assert(lap_of(kCommandOfLimits.low) == 1 && operation_of(kCommandOfLimits) == kSignal &&
                  bytes_of(kCommandOfLimits) == kMaxCommandBytes &&
                  source_of(kCommandOfLimits) == kMaxHeapBytes - kPieceBytes && peer_of(kCommandOfLimits) == 4095 &&
                  word_of(kCommandOfLimits) == 1023 && target_of(kCommandOfLimits) == kMaxHeapBytes - kPieceBytes,
              "the fields do not touch each other");

// The lap of a position in a ring of `commands` commands. A ring starts as zeros, which is the lap before the first.
constexpr u64 lap_at(u64 position, u64 commands) { return (position / commands + 1) & 1; }
static_assert(lap_at(0, 4) == 1 && lap_at(3, 4) == 1 && lap_at(4, 4) == 0 && lap_at(8, 4) == 1, "laps");

// --- immediates
// -------------------------------------------------------------------------------------------------------------------

// The immediate data of a message, in the 32 bits that every network has: source 12 | word 8 | generation 2 |
// sequence 6 | pieces 4. `word` is the index of a signal word among those of its source; `sequence` counts the source's
// messages to that word. `pieces`: the number of messages that a put was cut into, in its last message; 0 in the
// others.
struct Immediate {
    u32 source;
    u32 word;
    u32 generation;
    u32 sequence;
    u32 pieces;
};
constexpr u32 kSourceBits = 12, kImmediateWordBits = 8, kGenerationBits = 2, kSequenceBits = 6, kPiecesBits = 4;
static_assert(kSourceBits + kImmediateWordBits + kGenerationBits + kSequenceBits + kPiecesBits == 32, "32 bits");
constexpr u32 kWords = 1u << kImmediateWordBits;
static_assert(kMaxRegions * kOfRanks <= kWords, "every word that a rank has of another");
constexpr u32 kMaxMessages = (1u << kPiecesBits) - 1;  // per put

// Sequence numbers are unambiguous within a window of half of them: a message is sent only when all messages that are
// at least a window older have been delivered.
constexpr u32 kSequences = 1u << kSequenceBits, kWindow = kSequences / 2;

constexpr u32 pack(const Immediate& of) {
    return of.source << 20 | of.word << 12 | (of.generation & 3) << 10 | (of.sequence & (kSequences - 1)) << 4 |
           (of.pieces & kMaxMessages);
}
constexpr Immediate unpack(u32 bits) {
    return {bits >> 20, bits >> 12 & (kWords - 1), bits >> 10 & 3, bits >> 4 & (kSequences - 1), bits & kMaxMessages};
}
static_assert(pack(unpack(0xfedcba98)) == 0xfedcba98 && unpack(pack({4095, 255, 7, 65, 15})).source == 4095 &&
                  unpack(pack({0, 255, 7, 65, 15})).word == 255 && unpack(pack({0, 0, 7, 65, 0})).generation == 3 &&
                  unpack(pack({0, 0, 0, 65, 0})).sequence == 1 && unpack(pack({0, 0, 0, 0, 15})).pieces == 15,
              "immediate");

// The amount that one message adds to its word: together, the messages of a put add kUnit (P8).
constexpr u64 share(u32 pieces) { return pieces == 0 ? 1 : kUnit - (pieces - 1); }

}  // namespace deep_ep::wire::proxy
