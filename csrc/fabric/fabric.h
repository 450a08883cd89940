// put_signal and its neighbours (PROTOCOL P5), over whatever fabric reaches the peer.
//
//   address(peers, to, offset)       where that rank's heap is mapped here, else null
//   signal(...)                      one thread, after the block's barrier: publishes all stores the block made to `to`
//   put_signal(...)                  warp-collective: pieces, then the signal. Promises nothing about any other put
//   quiet(...)                       the block, then a barrier: own memory that puts of this operation read from may be
//                                    written again
//   fault(...)                       one thread: whether a fabric has been told of a request that failed
//
// A waiter is the operation that pays for blocking: `bool wait(Phase, peer, const u64* shown, u64 expected, ready)` and
// `bool wait_word(Phase, peer, const u64* word, u64 target)`; `bool outlast(...)`, as wait(), for what must be waited
// for even if the operation is given up meanwhile: it ends without `ready` by the time alone; with `bool masked(rank)`
// for ranks whose requests are waited for no longer.
#pragma once

#include "fabric/peer.h"
#include "fabric/registry.h"

namespace deep_ep::fabric {

DEEP_EP_DEVICE bool mapped(const Peers& peers, u32 to) { return peers.base[to] != nullptr; }

DEEP_EP_DEVICE u8* address(const Peers& peers, u32 to, u64 offset) {
    return mapped(peers, to) ? peers.base[to] + offset : nullptr;
}

namespace detail {

// One thread: to a peer that is not mapped.
template <class Waiter>
DEEP_EP_DEVICE bool post_by_route(const Peers& peers, Waiter& waiter, Completion& completion, u32 to,
                                  const Piece* pieces, u32 count, Word word) {
    return Registry::at(peers, peers.route[to],
                        [&](auto& state) { return post(peers, state, waiter, completion, to, pieces, count, word); });
}

}  // namespace detail

// One thread. Stores through address() by threads that met this one at a barrier are released with it.
template <class Waiter>
DEEP_EP_DEVICE bool signal(const Peers& peers, Waiter& waiter, Completion& completion, u32 to, Word word) {
    if (mapped(peers, to)) {
        peer::signal(peers, to, word);
        return true;
    }
    return detail::post_by_route(peers, waiter, completion, to, nullptr, 0, word);
}

// Warp-collective. What the pieces hold was written by this warp, or before a barrier it has passed.
template <class Waiter>
DEEP_EP_DEVICE bool put_signal(const Peers& peers, Waiter& waiter, Completion& completion, u32 to, const Piece* pieces,
                               u32 count, Word word) {
    if (mapped(peers, to)) {
        peer::put_signal(peers, to, pieces, count, word);
        return true;
    }
    __syncwarp();  // all lanes' stores into the pieces come before lane 0's release of the command
    int posted = 1;
    if (device::lane() == 0) {
        posted = detail::post_by_route(peers, waiter, completion, to, pieces, count, word);
    }
    return __shfl_sync(device::kFullMask, posted, 0) != 0;
}

// One thread.
DEEP_EP_DEVICE bool fault(const Peers& peers, Fault& found) {
    return !Registry::all(peers, [&](auto& state) { return !fault(peers, state, found); });
}

// The block, after all posting threads of the operation have been joined. A thread that returns false has given up; the
// barrier that follows joins them.
template <class Waiter>
DEEP_EP_DEVICE bool quiet(const Peers& peers, Waiter& waiter, Completion& completion) {
    return Registry::all(peers, [&](auto& state) { return quiet(peers, state, waiter, completion); });
}

}  // namespace deep_ep::fabric
