// Fabric `peer`: the other rank's heap is mapped here (NVLink, PCIe, one GPU, shared memory). Data moves by plain
// stores.
#pragma once

#include "fabric/peers.h"

namespace deep_ep::fabric::peer {

// Adds to a signal word of `to`: one unit, or a share of one if other threads add the rest. A thread of that rank that
// sees it (an acquire load at system scope) sees every store that this thread made before, and every store of other
// threads ordered before it by a barrier. Litmus: bar_then_release, mp_release_acquire_sys.
DEEP_EP_DEVICE void signal(const Peers& peers, u32 to, Word word, u64 amount = wire::kUnit) {
    // The word has one writer: this rank. It is an add and not a store, so that no thread must remember the total. Over
    // NVLink it is native (paths between GPUs where it is not are refused).
    device::add_release<device::Scope::kSystem>(reinterpret_cast<u64*>(peers.nears[to] + word.offset), amount);
}

// Warp-collective: copies the pieces, then signals.
DEEP_EP_DEVICE void put_signal(const Peers& peers, u32 to, const Piece* pieces, u32 count, Word word) {
    for (u32 i = 0; i < count; ++i) {
        device::warp_copy(peers.base[to] + pieces[i].target, peers.local + pieces[i].source, pieces[i].bytes);
    }
    __syncwarp();  // all lanes' stores come before lane 0's release
    if (device::lane() == 0) signal(peers, to, word);
}

}  // namespace deep_ep::fabric::peer
