// Fabric `ibgda`: kernels write work requests into a NIC's send queue and ring its doorbell. A put consists of RDMA
// writes followed by a fetch-and-add of the signal word on the same queue pair: a queue pair executes its requests in
// order, and an atomic does not overtake the data in front of it, since the heap is registered without relaxed ordering
// (P8). Nothing is assumed about other queue pairs. Litmus: nic_same_queue_pair.
//
// A NIC is a device on the bus or a host thread (sim/nic/network/nic_thread.h); either way it is outside the GPU.
// State that it shares with kernels is where both can reach it, and is accessed at system scope. State that only
// kernels use, the counts of a queue pair, is in this GPU's memory and is accessed at device scope.
//
// To post, a thread waits until WQEBBs (basic blocks of 64 bytes) of the ring are free, reserves them (`reserved`),
// fills them, and makes them valid in order (`filled`). If no thread has reserved WQEBBs after them, it notifies the
// NIC (`rung`). A thread that waits for room or for completions notifies the NIC too, so that no such wait is for a
// request that the NIC does not know of. Reserved WQEBBs are always made valid, even by a thread that must give up,
// since the WQEBBs after them may belong to other threads.
//
// The reason is that a queue pair may be shared with kernels of another library on this GPU, which post between our
// requests. They
//
//   * reserve WQEBBs by adding to `reserved`, and wait for room only afterwards: `reserved` may therefore be ahead of
//     `completed` by more than the ring holds;
//   * write whole WQEBBs, move `filled` from their first WQEBB to just after their last, in order, and release what
//     they have written there, for any thread that acquires it. They move it by an atomic, or acquire it first:
//     otherwise they would cut off what earlier threads have released;
//   * change `rung` only under the lock, upwards, together with the doorbell record and then the doorbell, which
//     release to the NIC what was acquired from `filled`; they never block while they hold the lock, and release it;
//   * raise `completed` no further than indicated by a completion that they have acquired, and release it;
//   * end each reservation with a request of a single WQEBB that asks for a completion, as ours do: whatever value
//     `filled` has had, some completion will reach it. The requests before it may be longer, and ask for none;
//   * wait for room and for completions without ringing, and leave the doorbell to threads after them, but ring when
//     they have filled a batch. A batch and twice their largest put fit into three quarters of the ring.
#pragma once

#include "fabric/peers.h"
#include "wire/mlx5.h"
#include "wire/outcome.h"

namespace deep_ep::fabric {

// A connection to one peer, in device memory. It is constant once the host has filled it. A compiler must reload any of
// its fields after each access that orders memory, so fields that are needed after such an access are copied before it.
struct QueuePair {
    // Shared by this rank's kernels and its NIC; in host memory for a software NIC.
    wire::mlx5::Block* ring;
    u32* record;    // DoorbellRecord::send
    u64* doorbell;  // the NIC's register
    const wire::mlx5::Cqe* cqe;
    u64 returned;      // address, as seen by the NIC, of a word that receives the old values of atomics; never read
    u32 returned_key;  // big-endian
    u32 number;
    u32 blocks;  // WQEBBs in the ring; a power of two
    u32 peer;
    u32 nic;         // index of this rank's NIC
    u32 remote_nic;  // index of the peer's NIC
    // WQEBBs, counted since the queue pair was made. The counts are in memory of the library that made it.
    u64* reserved;   // reserved by threads
    u64* filled;     // written, without gaps
    u64* rung;       // announced to the NIC
    u64* completed;  // at least this many are done
    u32* ringing;    // lock for `rung`, doorbell record and doorbell
    u64* rings;      // number of doorbells rung by this Buffer
};

// One per Buffer, in device memory. Keys are big-endian, as the NIC expects them.
struct Ibgda {
    static constexpr const char* kName = "ibgda";
    QueuePair* queue_pairs;  // [ranks, per_peer]; those of mapped ranks are not used
    u32 per_peer;
    u32 nics;                // NICs per rank
    u32 chunks;              // memory chunks that a heap spans; each has its own keys
    u32 chunk_log2;          // log2 of the bytes of a chunk
    u64 key_offset;          // bytes of the first chunk that precede the heap, the same on all ranks
    u64 max_bytes;           // largest request
    u64 heap;                // this rank's heap as its NICs address it
    const u64* heaps;        // [ranks] each rank's heap as remote NICs address it
    const u32* keys;         // [chunks, nics]
    const u32* remote_keys;  // [ranks, chunks, nics]
};

namespace ibgda {

using device::Scope;
namespace mlx5 = wire::mlx5;

// --- what the NIC has done ------------------------------------------------------------------------------------------

// One thread. Returns the number of completed WQEBBs: at least `known`, and those that the completion reports. The
// acquire pairs with the NIC's release of the completion: the NIC has read the requests' WQEBBs and the data they send.
// Litmus: nic_completion. Requests complete in order, so it does not matter whose request the completion belongs to.
DEEP_EP_DEVICE u64 completed_after(const QueuePair& qp, u64 known) {
    const u32 tail = device::load_acquire<Scope::kSystem>(&qp.cqe->tail);
    // Of a request that failed, nothing is done; the waiter finds the error (fault).
    if (mlx5::cqe_kind(tail) == mlx5::kRequestError) return known;
    // At most half as many WQEBBs as the NIC's counter can distinguish are ever in flight.
    return known + ((mlx5::cqe_index(tail) + 1 - known) & 0xffff);
}

// Read-only check, which may return true too early: note_completed() decides. Therefore the completion may be older
// than `completed`.
DEEP_EP_DEVICE bool looks_completed(const QueuePair& qp, u64 count) {
    const u64 known = device::load_relaxed<Scope::kDevice>(qp.completed);
    return known >= count || completed_after(qp, known) >= count;
}

// One thread: the same check, but decisive; updates `completed`.
DEEP_EP_DEVICE bool note_completed(const QueuePair& qp, u64 count) {
    u64* const completed = qp.completed;
    u64 known = device::load_acquire<Scope::kDevice>(completed);
    if (known >= count) return true;
    const u64 now = completed_after(qp, known);
    while (known < now) {
        const u64 before = known;
        // Release: a thread that acquires `completed` may write where the NIC has read.
        known = device::cas_release<Scope::kDevice>(completed, before, now);
        if (known == before) break;
    }
    return now >= count;
}

// --- notifying the NIC ----------------------------------------------------------------------------------------------

// One thread: notifies the NIC of all filled WQEBBs. `fenced`: the WQEBBs up to here are behind a fence of this thread
// at system scope.
DEEP_EP_DEVICE_CALL void ring(const QueuePair& qp, u64 fenced) {
    const QueuePair here = qp;
    // No thread, ours or NVSHMEM's, blocks while it holds the lock, so this wait always ends. The wait for `filled` is
    // different: it depends on code of the holder that waits for the NIC. A thread that finds the lock taken must wait
    // for it, since the holder may have read `filled` before this thread's WQEBBs were filled. The next holder sees
    // what the lock guards, even if the previous holder belonged to another library: it acquires what the previous
    // holder released with the lock, and has nothing of its own to release yet. Litmus: ring_lock.
    while (device::cas_acquire<Scope::kDevice>(here.ringing, 0u, 1u) != 0) {
        device::spin_until([&] { return device::load_relaxed<Scope::kDevice>(here.ringing) == 0; }, ~0ull, nullptr);
    }
    const u64 rung = device::load_relaxed<Scope::kDevice>(here.rung);  // stored only under the lock
    // Acquire: the WQEBBs of all threads that have made theirs valid.
    const u64 filled = device::load_acquire<Scope::kDevice>(here.filled);
    // Release: what this thread has acquired with the lock, for the next holder.
    if (filled <= rung) return device::store_release<Scope::kDevice>(here.ringing, 0u);
    if (filled != fenced) device::fence_release<Scope::kSystem>();
    // The NIC may serve an earlier doorbell and read this doorbell record. Therefore the record, not only the doorbell,
    // must release the WQEBBs. Litmus: ibgda_record_release, ibgda_fill_in_order.
    device::store_fenced<Scope::kSystem>(here.record, mlx5::send_counter(filled));
    // It grows only under the lock, so a store suffices. Threads that read it without the lock use it as a hint.
    device::store_relaxed<Scope::kDevice>(here.rung, filled);
    // Before the doorbell, since the NIC reads the record when the doorbell has reached it, and before the lock is let
    // go. Litmus: ibgda_doorbell. A doorbell is an event, and the record has the count: those of two threads may reach
    // the NIC in either order.
    device::fence_release<Scope::kSystem>();  // of the record, and of `rung`
    device::store_fenced<Scope::kSystem>(here.doorbell, mlx5::doorbell(here.number, filled));
    device::store_fenced<Scope::kDevice>(here.ringing, 0u);
    device::add_relaxed<Scope::kDevice>(here.rings, 1ull);  // only counted
}

// One thread: waits until `count` WQEBBs are done. Returns false if the waiter has given up.
template <class Waiter>
DEEP_EP_DEVICE_CALL bool await_completed(const QueuePair& qp, Waiter& waiter, wire::Phase phase, u64 count) {
    while (!note_completed(qp, count)) {
        const auto unrung = [&] {
            return device::load_relaxed<Scope::kDevice>(qp.filled) > device::load_relaxed<Scope::kDevice>(qp.rung);
        };
        // Other threads leave the doorbell to those after them, such as this one.
        if (unrung()) ring(qp, 0);
        const bool going_on = waiter.wait(phase, static_cast<i32>(qp.peer), qp.completed, count,
                                          [&] { return looks_completed(qp, count) || unrung(); });
        if (!going_on) return false;
    }
    return true;
}

// --- room in the ring -----------------------------------------------------------------------------------------------

// One thread: reserves `count` consecutive WQEBBs once they are free, that is, once the requests that were there are
// done. The host ensures that this many fit. Returns false if the waiter has given up; nothing has been reserved then.
template <class Waiter>
DEEP_EP_DEVICE bool reserve(const QueuePair& qp, Waiter& waiter, u32 count, u64& begin) {
    // It only hands out WQEBBs: `completed`, acquired here or in the wait, says that they are free, and `filled` orders
    // them.
    u64* const reserved = qp.reserved;
    begin = device::load_relaxed<Scope::kDevice>(reserved);
    const u64 known = device::load_acquire<Scope::kDevice>(qp.completed);
    for (;;) {
        const u64 end = begin + count;
        if (end > known + qp.blocks && !await_completed(qp, waiter, wire::Phase::kPost, end - qp.blocks)) return false;
        // There is room for these WQEBBs from now on, since `completed` only grows. Are they still available?
        const u64 found = device::cas_relaxed<Scope::kDevice>(reserved, begin, end);
        if (found == begin) return true;
        begin = found;
    }
}

// --- requests -------------------------------------------------------------------------------------------------------

// Bytes from an offset in a heap to the end of its chunk.
DEEP_EP_DEVICE u64 rest_of_chunk(const Ibgda& net, u64 offset) {
    const u64 chunk = 1ull << net.chunk_log2;
    return chunk - ((offset + net.key_offset) & (chunk - 1));
}

// Bytes of a piece, starting at `done`, that one request may carry: keys end with their chunks, at both ends.
DEEP_EP_DEVICE u64 next_cut(const Ibgda& net, const Piece& piece, u64 done) {
    const u64 bytes = min(min(piece.bytes - done, net.max_bytes), rest_of_chunk(net, piece.source + done));
    return min(bytes, rest_of_chunk(net, piece.target + done));
}

DEEP_EP_DEVICE u32 chunk_of(const Ibgda& net, u64 offset) {
    return static_cast<u32>((offset + net.key_offset) >> net.chunk_log2);
}
DEEP_EP_DEVICE u32 key(const Ibgda& net, const QueuePair& qp, u64 offset) {
    return net.keys[chunk_of(net, offset) * net.nics + qp.nic];
}
DEEP_EP_DEVICE u32 remote_key(const Ibgda& net, const QueuePair& qp, u64 offset) {
    const u64 chunk = u64{qp.peer} * net.chunks + chunk_of(net, offset);
    return net.remote_keys[chunk * net.nics + qp.remote_nic];
}

// Where requests are written.
struct Ring {
    mlx5::Block* blocks;
    u32 count;   // a power of two
    u32 number;  // of the queue pair

    DEEP_EP_DEVICE static Ring of(const QueuePair& qp) { return {qp.ring, qp.blocks, qp.number}; }
    DEEP_EP_DEVICE mlx5::Block& at(u64 index) const { return blocks[index & (count - 1)]; }
};

// The keys of a request, which are those of its chunks at both ends.
struct Keys {
    u32 source, target;

    DEEP_EP_DEVICE static Keys of(const Ibgda& net, const QueuePair& qp, u64 source, u64 target) {
        return {key(net, qp, source), remote_key(net, qp, target)};
    }
};

DEEP_EP_DEVICE void write_request(const Ring& ring, u64 index, u64 source, u64 target, const Keys& keys, u64 bytes) {
    mlx5::Block& block = ring.at(index);
    block.control = mlx5::control(mlx5::kRdmaWrite, index, ring.number, mlx5::kUnitsOfWrite, false);
    block.remote = mlx5::remote_address(target, keys.target);
    block.data = mlx5::data(source, keys.source, static_cast<u32>(bytes));
}

// With a completion: the last request of a put reports for all requests before it.
DEEP_EP_DEVICE void add_request(const Ring& ring, const QueuePair& qp, u64 index, u64 word, u32 word_key) {
    mlx5::Block& block = ring.at(index);
    block.control = mlx5::control(mlx5::kFetchAdd, index, ring.number, mlx5::kUnitsOfFetchAdd, true);
    block.remote = mlx5::remote_address(word, word_key);
    block.atomic = mlx5::fetch_add(wire::kUnit);
    block.returned = mlx5::data(qp.returned, qp.returned_key, sizeof(u64));
}

// One thread: waits until all WQEBBs before the reserved ones are filled. `before`: what it has found already.
//
// Reserved WQEBBs are published even if the operation is given up meanwhile (P14). The turn comes whatever the NIC
// does: these WQEBBs were free when they were reserved, so those before them are free too, including another library's,
// and their threads wait for nothing else. There is a bound nonetheless, in case a thread of another library hangs.
template <class Waiter>
DEEP_EP_DEVICE_CALL bool await_turn(u64* filled, u32 to, Waiter& waiter, u64 begin, u64 before) {
    const auto our_turn = [&] { return before == begin || device::load_relaxed<Scope::kDevice>(filled) == begin; };
    return waiter.outlast(wire::Phase::kPost, static_cast<i32>(to), filled, begin, our_turn);
}

}  // namespace ibgda

// One thread. The contents of the pieces are ordered before the call. All puts to one word use the same queue pair.
template <class Waiter>
DEEP_EP_DEVICE_CALL bool post(const Peers&, const Ibgda& net, Waiter& waiter, Completion&, u32 to, const Piece* pieces,
                              u32 count, Word word) {
    using namespace ibgda;
    // Loaded first: after an acquire, what these depend on would be loaded from the L2 again.
    const QueuePair& qp = net.queue_pairs[to * net.per_peer + word.number % net.per_peer];
    const Ring requests = Ring::of(qp);
    u64* const filled = qp.filled;
    const u64 *const reserved = qp.reserved, *const announced = qp.rung;
    const u64 heap = net.heaps[to];
    const u32 word_key = remote_key(net, qp, word.offset);
    Keys keys = count != 0 ? Keys::of(net, qp, pieces[0].source, pieces[0].target) : Keys{};
    u32 needed = 1;
    for (u32 i = 0; i < count; ++i) {
        for (u64 done = 0; done < pieces[i].bytes; done += next_cut(net, pieces[i], done)) ++needed;
    }
    u64 begin = 0;
    if (!reserve(qp, waiter, needed, begin)) return false;
    const u64 end = begin + needed;
    u64 index = begin;
    for (u32 i = 0; i < count; ++i) {
        for (u64 done = 0; done < pieces[i].bytes;) {
            const u64 bytes = next_cut(net, pieces[i], done);
            const u64 source = pieces[i].source + done, target = pieces[i].target + done;
            if ((i | done) != 0) keys = Keys::of(net, qp, source, target);
            write_request(requests, index++, net.heap + source, heap + target, keys, bytes);
            done += bytes;
        }
    }
    add_request(requests, qp, index, heap + word.offset, word_key);
    // In order. The last fence before the doorbell record passes on these WQEBBs, and those of the threads before that
    // have been acquired by then: here, if they are all filled, or by the thread that rings. Until then each thread's
    // own fence releases its WQEBBs, with an atomic: a store would cut off those before.
    const u64 before = device::load_acquire<Scope::kDevice>(filled);
    device::fence_release<Scope::kSystem>();  // of these WQEBBs
    if (!await_turn(filled, to, waiter, begin, before)) return false;
    // A thread that has reserved WQEBBs after these will fill them and then make this check itself. But a thread of
    // another library may wait for room first, for requests that no thread has rung for. Therefore only a bounded
    // number of WQEBBs is left to it. Relaxed: a count that is too low only causes one more ring.
    const u64 last = device::load_relaxed<Scope::kDevice>(reserved);
    const u64 rung = device::load_relaxed<Scope::kDevice>(announced);
    device::add_fenced<Scope::kDevice>(filled, u64{needed});
    if (last == end || end > rung + requests.count / 4) {
        ring(qp, before == begin ? end : 0);
    }
    return true;
}

// The block, after all posting threads have been joined: each thread waits for its share of the queue pairs, since a
// single thread that walked over all of them would pay a memory latency for each. Returns true if the NIC has read
// everything posted to the thread's share; the block's next barrier extends that to all queue pairs.
template <class Waiter>
DEEP_EP_DEVICE_CALL bool quiet(const Peers& peers, const Ibgda& net, Waiter& waiter, Completion&) {
    using namespace ibgda;
    for (u32 i = threadIdx.x; i < peers.ranks * net.per_peer; i += blockDim.x) {
        const QueuePair& qp = net.queue_pairs[i];
        if (qp.cqe == nullptr) continue;  // not used
        // Puts in flight to a masked rank do not arrive: the memory that they read from may change.
        if (waiter.masked(qp.peer)) continue;
        const u64 filled = device::load_relaxed<Scope::kDevice>(qp.filled);
        if (!await_completed(qp, waiter, wire::Phase::kQuiet, filled) && !waiter.masked(qp.peer)) return false;
    }
    return true;
}

// One thread: finds a failed request. A queue pair whose completion reports an error does nothing any more, even if the
// request was another library's.
DEEP_EP_DEVICE bool fault(const Peers& peers, const Ibgda& net, Fault& found) {
    using namespace ibgda;
#pragma unroll 1
    for (u32 i = 0; i < peers.ranks * net.per_peer; ++i) {
        const QueuePair& qp = net.queue_pairs[i];
        if (qp.cqe == nullptr) continue;  // not used
        // Acquire: the NIC has written the rest before; whatever it writes later is an error too.
        const u32 tail = device::load_acquire<Scope::kSystem>(&qp.cqe->tail);
        if (mlx5::cqe_kind(tail) != mlx5::kRequestError) continue;
        found = {qp.peer, mlx5::cqe_index(tail), static_cast<u64>(qp.cqe->vendor) << 8 | qp.cqe->syndrome};
        return true;
    }
    return false;
}

}  // namespace deep_ep::fabric
