// How a kernel reaches the other ranks of a Buffer.
#pragma once

#include "device/device.h"
#include "wire/heap_layout.h"

namespace deep_ep::fabric {

struct WeakQueue;
struct Ibgda;

// Device memory; made once with the Buffer. Kernels hold a pointer, never a copy, so that it may change under a
// captured graph.
struct Peers {
    u32 rank;
    u32 ranks;
    u8* local;        // this rank's heap
    u8* const* base;  // [ranks] the peers' heaps, null where a peer is not load/store-reachable
    // [ranks] bytes of each heap that there is memory behind, here. The host raises them while kernels run (P10).
    const u64* mapped_bytes;
    Ibgda* ibgda;     // reaches peers that are not mapped; null where there are none, or `weak` is used
    WeakQueue* weak;  // reaches them instead; else null
    wire::HeapLayout heap;
};

// Local completion of the puts of one operation: a put has completed once its pieces have been read from this rank's
// memory.
struct Completion {
    u64 posted;
    u64 completed;
};

// A piece of a put: `bytes` at `source` in this rank's heap go to `target` in the peer's. Offsets and bytes are
// multiples of 16.
struct Piece {
    u64 source;
    u64 target;
    u64 bytes;
};
constexpr u32 kMaxPieces = 2;

// A signal word of the peer's.
struct Word {
    u64 offset;  // in the peer's heap
    u32 queue;   // puts with the same word have the same number here, and take the same of the queue pairs to a peer
};

}  // namespace deep_ep::fabric
