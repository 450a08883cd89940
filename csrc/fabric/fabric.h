// put_signal and its neighbours (PROTOCOL P5), over whatever fabric reaches the peer.
//
//   address(peers, to, offset)       where that rank's heap is mapped here, else null
//   signal(...)                      one thread, after the block's barrier: publishes all stores the block made to `to`
//   put_signal(...)                  warp-collective: pieces, then the signal. Promises nothing about any other put
//   quiet(...)                       the block, then a barrier: own memory that puts of this operation read from may be
//                                    written again
//
// A waiter is the operation that pays for blocking: `bool wait(Phase, peer, const u64* shown, u64 expected, ready)` and
// `bool wait_word(Phase, peer, const u64* word, u64 target)`.
#pragma once

#include "fabric/ibgda.h"
#include "fabric/peer.h"
#include "fabric/weak.h"

namespace deep_ep::fabric {

DEEP_EP_DEVICE bool mapped(const Peers& peers, u32 to) { return peers.base[to] != nullptr; }

DEEP_EP_DEVICE u8* address(const Peers& peers, u32 to, u64 offset) {
    return mapped(peers, to) ? peers.base[to] + offset : nullptr;
}

namespace detail {

// One thread: to a peer that is not mapped.
template <class Waiter>
DEEP_EP_DEVICE bool post(const Peers& peers, Waiter& waiter, Completion& completion, u32 to, const Piece* pieces,
                         u32 count, Word word) {
    if (peers.ibgda != nullptr) return ibgda::post(peers, waiter, to, pieces, count, word);
    return weak::post(peers, waiter, completion, to, pieces, count, word);
}

}  // namespace detail

// One thread. Stores through address() by threads that met this one at a barrier are released with it.
template <class Waiter>
DEEP_EP_DEVICE bool signal(const Peers& peers, Waiter& waiter, Completion& completion, u32 to, Word word) {
    if (mapped(peers, to)) {
        peer::signal(peers, to, word);
        return true;
    }
    return detail::post(peers, waiter, completion, to, nullptr, 0, word);
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
    if (device::lane() == 0) posted = detail::post(peers, waiter, completion, to, pieces, count, word);
    return __shfl_sync(device::kFullMask, posted, 0) != 0;
}

// One thread: a queue pair that has failed, or null.
DEEP_EP_DEVICE const QueuePair* failed_queue_pair(const Peers& peers) {
    if (peers.ibgda == nullptr) return nullptr;
#pragma unroll 1
    for (u32 i = 0; i < peers.ranks * peers.ibgda->per_peer; ++i) {
        const QueuePair& qp = peers.ibgda->queue_pairs[i];
        if (!mapped(peers, qp.peer) && ibgda::failed(qp)) return &qp;
    }
    return nullptr;
}

// The block, after all posting threads of the operation have been joined. A thread that returns false has given up; the
// barrier that follows joins them. The agent adds to `completed` (release, system) when it has read a put's pieces.
template <class Waiter>
DEEP_EP_DEVICE bool quiet(const Peers& peers, Waiter& waiter, Completion& completion) {
    if (peers.ibgda != nullptr) return ibgda::quiet(peers, waiter);
    if (threadIdx.x != 0) return true;
    const u64 posted = device::load_relaxed<device::Scope::kDevice>(&completion.posted);
    return waiter.wait_word(wire::Phase::kQuiet, -1, &completion.completed, posted);
}

}  // namespace deep_ep::fabric
