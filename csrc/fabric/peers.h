// How a kernel reaches the other ranks of a Buffer.
#pragma once

#include "device/device.h"
#include "wire/heap_layout.h"
#include "wire/host_words.h"

namespace deep_ep::fabric {

// What reaches a rank: loads and stores, else a fabric by its place in registry.h, from 1 on.
using Route = u8;
constexpr Route kMapped = 0;
constexpr u32 kMaxRoutes = 8;
// No operation of the Buffer has to do with this rank.
constexpr Route kUnreached = 0xff;
static_assert(kUnreached >= kMaxRoutes, "no fabric's place");

// Device memory; made once with the Buffer. Kernels hold a pointer, never a copy, so that it may change under a
// captured graph.
struct Peers {
    u32 rank;
    u32 ranks;
    u8* local;           // this rank's heap
    u8* const* base;     // [ranks] the peers' heaps, null where a peer is not load/store-reachable
    const Route* route;  // [ranks] kMapped where `base` is not null, kUnreached where nothing is ever sent
    // [ranks] bytes of each heap that there is memory behind, here. The host raises them while kernels run (P10).
    const u64* mapped_bytes;
    // By route: what that fabric keeps in device memory; null where no rank is reached by it.
    void* states[kMaxRoutes];
    wire::HeapLayout heap;
    wire::HostWords host_words;  // this rank's signal words that are not in its heap
};

// Local completion of the puts of one operation, for fabrics that count them: a put has completed once its pieces have
// been read from this rank's memory.
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
constexpr u32 kMaxPieces = 3, kUsualPieces = 2;  // of a put

// A signal word of the peer's.
struct Word {
    u64 offset;  // in the peer's heap
    u32 number;  // among the words that a peer has of this rank; puts to one word take the same of several queue pairs
};

// What a fabric has been told of a request that failed: nothing reaches that peer any more.
struct Fault {
    u32 peer;
    u64 request;
    u64 error;  // in the fabric's own code
};

// All that post, by the types of what each keeps in device memory.
template <class... States>
struct Fabrics {
    static_assert(sizeof...(States) < kMaxRoutes, "routes");

    // Whether `visit(state)` holds for the fabric of a route.
    template <class Visit>
    DEEP_EP_DEVICE static bool at(const Peers& peers, Route route, Visit visit) {
        Route place = kMapped;
        bool result = false;
        (void)((++place == route && ((result = visit(*static_cast<States*>(peers.states[place]))), true)) || ...);
        return result;
    }
    // Whether `visit(state)` holds for every fabric in use; asked up to the first for which it does not.
    template <class Visit>
    DEEP_EP_DEVICE static bool all(const Peers& peers, Visit visit) {
        Route place = kMapped;
        return ((++place, peers.states[place] == nullptr || visit(*static_cast<States*>(peers.states[place]))) && ...);
    }
};

}  // namespace deep_ep::fabric
