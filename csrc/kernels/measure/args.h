// Arguments of kernels that only measurements launch, and what they answer.
#pragma once

#include "kernels/common/context.h"

namespace deep_ep {

struct PostArgs {
    CallArgs call;
    u32 to;
    u32 posters;  // warps of each block
    u32 puts;     // of each
    u64 bytes;    // of each; a multiple of 16
    u64 source;   // in this rank's heap
    u64 target;   // in `to`'s heap: `bytes` for each poster
    u64 words;    // in `to`'s heap: one for each poster
};

struct HandshakeArgs {
    u64* own;        // the one before in the ring adds here
    u64* next;       // this one adds here
    u64 turns;       // how often
    u64 timeout_ns;  // of all turns together
    u64* outcome;    // polled by the host
};

enum class Handshake : u64 { kUnderWay = 0, kShaken = 1, kTimedOut = 2 };

}  // namespace deep_ep
