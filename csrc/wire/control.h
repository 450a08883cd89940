// Frames between the hosts of ranks on different machines, over TCP: what hosts of one machine tell each other by the
// control pages of their heaps. A connection has two ranks, one at each end, so no frame says whose it is.
//
//   Frame | payload | Tag
//
// Numbers are as these machines have them: little-endian.
#pragma once

#include "wire/heap_layout.h"

namespace deep_ep::wire::control {

enum Kind : u32 {
    kBeat = 1,     // Beat; or empty, where its sender has nothing to tell yet
    kAbort = 2,    // Abort
    kStage = 3,    // RecoveryWord: of the sender
    kAddress = 4,  // NetworkAddress: of the sender
    kMessage = 5,  // what ranks exchange while a Buffer is made
    kAsk = 6,      // Question: are all frames before it in place?
    kAnswer = 7,   // Question: yes
    kUnheard = 8,  // empty: nothing has come from the receiver's machine for too long, the sender goes on without it
};

struct Frame {
    u32 bytes;  // of the payload
    u32 kind;
    u64 number;  // of the connection's frames in this direction, from 0
};
static_assert(sizeof(Frame) == 16, "frame");

// Of a frame and its payload, by the key of its direction.
struct Tag {
    u64 words[2];
    friend bool operator==(const Tag&, const Tag&) = default;
};
static_assert(sizeof(Tag) == 16, "tag");

// The words of HeapHeader with these names, and the generation that the announcement is of.
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

// A machine is silent when nothing has come from any of its ranks for so long. Every rank sends something each kBeatNs.
constexpr u64 kBeatNs = 1'000'000'000, kSilentNs = 5'000'000'000;

}  // namespace deep_ep::wire::control
