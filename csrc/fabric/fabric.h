// put_signal and related functions (PROTOCOL P5), over whichever fabric reaches the peer.
//
//   address(peers, to, offset)       address of that rank's heap here if it is mapped, otherwise null
//   signal(...)                      one thread, after a barrier of its block or warp: publishes all stores of their
//                                    threads to `to`
//   put_signal(...)                  warp-collective: pieces, then the signal. Guarantees nothing about other puts
//   quiet(...)                       the block, then a barrier: local memory that puts of this operation read from may
//                                    be written again
//   fault(...)                       one thread: whether a failed request has been reported to a fabric
//
// A waiter is the operation that bears the cost of blocking. It has `bool wait(Phase, peer, const u64* shown, u64
// expected, ready)` and `bool wait_word(Phase, peer, const u64* word, u64 target)`; `bool outlast(...)`, which is like
// wait() for conditions that must be waited for even if the operation is given up meanwhile, so that without `ready`
// only the time ends it; and `bool masked(rank)`, for ranks whose requests are no longer waited for.
#pragma once

#include "fabric/peer.h"
#include "fabric/registry.h"

namespace deep_ep::fabric {

DEEP_EP_DEVICE bool mapped(const Peers& peers, u32 to) { return kRoutes == 0 || peers.base[to] != nullptr; }

DEEP_EP_DEVICE u8* address(const Peers& peers, u32 to, u64 offset) {
    return mapped(peers, to) ? peers.base[to] + offset : nullptr;
}

namespace detail {

// One thread: posts to a peer that is not mapped.
template <class Waiter>
DEEP_EP_DEVICE bool post_by_route(const Peers& peers, Waiter& waiter, Completion& completion, u32 to,
                                  const Piece* pieces, u32 count, Word word) {
    return Registry::at(peers, peers.route[to],
                        [&](auto& state) { return post(peers, state, waiter, completion, to, pieces, count, word); });
}

}  // namespace detail

// One thread. Releases stores through address() by all threads that met this one at a barrier of the block or the warp.
template <class Waiter>
DEEP_EP_DEVICE bool signal(const Peers& peers, Waiter& waiter, Completion& completion, u32 to, Word word) {
    if (mapped(peers, to)) {
        peer::signal(peers, to, word);
        return true;
    }
    return detail::post_by_route(peers, waiter, completion, to, nullptr, 0, word);
}

// Warp-collective. The contents of the pieces were written by this warp, or before a barrier that it has passed.
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
// barrier that follows joins the results.
template <class Waiter>
DEEP_EP_DEVICE bool quiet(const Peers& peers, Waiter& waiter, Completion& completion) {
    return Registry::all(peers, [&](auto& state) { return quiet(peers, state, waiter, completion); });
}

}  // namespace deep_ep::fabric
