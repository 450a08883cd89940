// Fabric `toy`: the minimum needed to add a fabric. The posting thread itself does a NIC's work.
#pragma once

#include "fabric/peers.h"

namespace deep_ep::fabric {

struct Toy {
    static constexpr const char* kName = "toy";
    u8* const* heaps;  // [ranks] as mapped by the host; kernels are not told of them
    u64 puts;
};

// Called by one thread. The contents of the pieces are ordered before.
template <class Waiter>
DEEP_EP_DEVICE_CALL bool post(const Peers& peers, Toy& toy, Waiter&, Completion&, u32 to, const Piece* pieces,
                              u32 count, Word word) {
    for (u32 i = 0; i < count; ++i) {
        const u8* const source = peers.local + pieces[i].source;
        u8* const target = toy.heaps[to] + pieces[i].target;
        for (u64 at = 0; at < pieces[i].bytes; ++at) target[at] = source[at];
    }
    device::add_relaxed<device::Scope::kDevice>(&toy.puts, u64{1});  // the host reads it at the end
    // The receiver acquires it and then reads the pieces.
    device::add_release<device::Scope::kSystem>(reinterpret_cast<u64*>(toy.heaps[to] + word.offset), wire::kUnit);
    return true;
}

// Nothing is in flight once post() has returned.
template <class Waiter>
DEEP_EP_DEVICE bool quiet(const Peers&, Toy&, Waiter&, Completion&) {
    return true;
}

DEEP_EP_DEVICE bool fault(const Peers&, const Toy&, Fault&) { return false; }

}  // namespace deep_ep::fabric
