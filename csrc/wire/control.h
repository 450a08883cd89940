// Frames between the hosts of ranks on different machines, over TCP. They carry what hosts of one machine exchange
// through the control pages of their heaps. A connection has one rank at each end, so a frame does not name its sender.
//
//   Frame | payload | Tag
//
// Numbers are little-endian.
#pragma once

#include "wire/heap_layout.h"

namespace deep_ep::wire::control {

enum Kind : u32 {
    kBeat = 1,     // Beat; or empty if the sender has nothing to report yet
    kAbort = 2,    // Abort
    kStage = 3,    // RecoveryWord of the sender
    kAddress = 4,  // NetworkAddress of the sender
    kMessage = 5,  // a message between ranks during the construction of a Buffer
    kAsk = 6,      // Question: have all frames before it taken effect?
    kAnswer = 7,   // Question: yes
    kUnheard = 8,  // empty: the receiver's machine has been silent for too long; the sender continues without it
};

struct Frame {
    u32 bytes;  // payload bytes
    u32 kind;
    u64 number;  // counts the frames of the connection in this direction, from 0
};
static_assert(sizeof(Frame) == 16, "frame");

// Authenticates a frame and its payload, with the key of its direction.
struct Tag {
    u64 words[2];
    friend bool operator==(const Tag&, const Tag&) = default;
};
static_assert(sizeof(Tag) == 16, "tag");

// The words of HeapHeader with these names, and the generation of the announcement.
struct Beat {
    u64 generation;
    u64 announcement;
    u64 compiling;
    u64 left;
};
struct Abort {
    u64 generation;
    u64 word;  // abort_word()
};
struct Question {
    u64 number;
};
static_assert(sizeof(Beat) == 32 && sizeof(Abort) == 16 && sizeof(Question) == 8, "payloads without holes");
static_assert(sizeof(RecoveryWord) == sizeof(RankMask) + 8, "payload without holes");

constexpr u32 kMaxPayload = 1u << 17;
static_assert(sizeof(RecoveryWord) <= kMaxPayload && sizeof(NetworkAddress) <= kMaxPayload, "payloads fit");

// A machine counts as silent when nothing has arrived from any of its ranks for kSilentNs. Every rank sends a frame at
// least every kBeatNs.
constexpr u64 kBeatNs = 1'000'000'000, kSilentNs = 5'000'000'000;

}  // namespace deep_ep::wire::control
