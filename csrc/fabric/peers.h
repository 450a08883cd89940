// How a kernel reaches the other ranks of a Buffer.
#pragma once

#include "device/device.h"
#include "wire/far_words.h"
#include "wire/heap_layout.h"

namespace deep_ep::fabric {

// How a rank is reached: by loads and stores, or by a fabric, given by its position in registry.h, counted from 1.
using Route = u8;
constexpr Route kMapped = 0;
constexpr u32 kMaxRoutes = 8;
// No operation of the Buffer involves this rank.
constexpr Route kUnreached = 0xff;
static_assert(kUnreached >= kMaxRoutes, "must not be the position of a fabric");

// Device memory, made once with the Buffer. Kernels hold a pointer, never a copy, so that it may change under a
// captured graph.
struct Peers {
    u32 rank;
    u32 ranks;
    u8* local;           // the far part of this rank's heap
    u8* const* base;     // [ranks] those of the peers; null if a peer is not reachable by loads and stores
    u8* near;            // the near part of this rank's heap
    u8* const* nears;    // [ranks] those of the peers; null where `base` is
    const Route* route;  // [ranks] kMapped if `base` is not null, kUnreached if nothing is ever sent
    // [ranks] bytes of each heap that are backed by memory here. The host raises them while kernels run (P10).
    const u64* mapped_bytes;
    // By route: the fabric's state in device memory; null if it reaches no rank.
    void* states[kMaxRoutes];
    wire::HeapLayout heap;
    wire::FarWords far_words;  // this rank's signal words that are in the far part
};

// Local completion of the puts of one operation, for fabrics that count them: a put has completed once its pieces have
// been read from this rank's memory.
struct Completion {
    u64 posted;
    u64 completed;
};

// A piece of a put: `bytes` bytes at `source` in this rank's heap go to `target` in the peer's heap. Offsets and bytes
// are multiples of 16.
struct Piece {
    u64 source;
    u64 target;
    u64 bytes;
};
constexpr u32 kMaxPieces = 3, kUsualPieces = 2;  // per put

// A signal word of a peer.
struct Word {
    u64 offset;  // in either part of the peer's heap
    u32 number;  // index among this rank's words at a peer; selects one of several queue pairs, so all puts to a word
                 // share one
};

// A failed request, as reported to a fabric: nothing reaches that peer any more.
struct Fault {
    u32 peer;
    u64 request;
    u64 error;  // in the fabric's own code
};

// The routes that kernels are compiled for besides kMapped, a bit for each: by default all. Without any, kernels know
// that all ranks are mapped.
#ifndef DEEP_EP_ROUTES
#define DEEP_EP_ROUTES (~0u)
#endif
constexpr u32 kRoutes = DEEP_EP_ROUTES;

// All fabrics that post, by the types of their state in device memory.
template <class... States>
struct Fabrics {
    static_assert(sizeof...(States) < kMaxRoutes, "routes");

    static constexpr bool has(Route route) { return (kRoutes >> route & 1) != 0; }

    // Returns whether `visit(state)` holds for the fabric of a route.
    template <class Visit>
    DEEP_EP_DEVICE static bool at(const Peers& peers, Route route, Visit visit) {
        Route place = kMapped;
        bool result = false;
        (void)((++place == route && has(place) &&
                ((result = visit(*static_cast<States*>(peers.states[place]))), true)) ||
               ...);
        return result;
    }
    // Returns whether `visit(state)` holds for every fabric in use; stops at the first one for which it does not.
    template <class Visit>
    DEEP_EP_DEVICE static bool all(const Peers& peers, Visit visit) {
        Route place = kMapped;
        return ((++place,
                 !has(place) || peers.states[place] == nullptr || visit(*static_cast<States*>(peers.states[place]))) &&
                ...);
    }
};

}  // namespace deep_ep::fabric
