// Fabric `ibgda`: kernels write work requests into a NIC's send queue and ring its doorbell. A put is RDMA writes and,
// behind them on the same queue pair, a fetch-and-add of the signal word: a queue pair carries out its requests in
// order, and an atomic never overtakes the data in front of it. Of other queue pairs nothing is assumed. Litmus:
// nic_same_queue_pair.
//
// A NIC is a device on the bus, or a thread of the host (host/network/ibgda/nic_thread.h): outside the GPU either way.
// What it shares with kernels lies where both reach it and is accessed at system scope; what kernels alone use, a queue
// pair's counts, lies in this GPU's memory and is accessed at device scope.
//
// A thread that posts waits until blocks of the ring are free, takes them (`reserved`), writes them, and makes them
// valid in order (`filled`). If no thread has taken blocks behind them, it tells the NIC (`rung`). A thread that waits
// for room or for completions tells the NIC too, so that no such wait is for a request that the NIC has not been told
// of. Blocks that are taken are always made valid, even by a thread that has to give up: what lies behind them may be
// others'.
//
// For a queue pair may be shared with kernels of another library on this GPU, which post between our requests. They
//
//   * take blocks by adding to `reserved`, and wait for room only then: so `reserved` may be ahead of `completed` by
//     more than the ring holds;
//   * write whole blocks, move `filled` from their first block to behind their last, in order, and release there what
//     they have written, for any thread that acquires it;
//   * change `rung` under the lock alone, upwards, with the record and then the doorbell, which release to the NIC what
//     was acquired from `filled`; they block nowhere with the lock, and release it;
//   * raise `completed` no further than a completion that they have acquired says, and release it;
//   * make the last request of what they take one of a single block that asks for a completion, as ours is: whatever
//     `filled` has been, some completion will reach it. Those before it may be longer, and ask for none;
//   * wait for room and for completions without ringing, and leave the doorbell to threads behind them, but ring when
//     they have filled up a batch. A batch and twice their largest put fit into three quarters of the ring.
#pragma once

#include "fabric/peers.h"
#include "wire/mlx5.h"
#include "wire/outcome.h"

namespace deep_ep::fabric {

// A connection to one peer, in device memory. The host fills it, and then it stays as it is. A compiler has to load any
// of it again after each access that orders memory: what is needed behind one is copied before.
struct QueuePair {
    // Where this rank's kernels and its NIC meet: memory of the host for one in software.
    wire::mlx5::Block* ring;
    u32* record;    // DoorbellRecord::send
    u64* doorbell;  // the NIC's register
    const wire::mlx5::Cqe* cqe;
    u64 returned;      // address, for the NIC, of a word for the old values of atomics; never read
    u32 returned_key;  // big endian
    u32 number;
    u32 blocks;  // of the ring; a power of two
    u32 peer;
    u32 nic;         // of this rank
    u32 remote_nic;  // of the peer
    // Blocks, counted since the queue pair was made. They lie in memory of its maker's.
    u64* reserved;   // handed out to threads
    u64* filled;     // written, without gaps
    u64* rung;       // told to the NIC
    u64* completed;  // at least so many are done
    u32* ringing;    // lock of `rung`, record and doorbell
    u64* rings;      // this Buffer's doorbells
};

// One per Buffer, in device memory. Keys are big endian, as the NIC wants them.
struct Ibgda {
    static constexpr const char* kName = "ibgda";
    QueuePair* queue_pairs;  // [ranks, per_peer]; those of mapped ranks are not used
    u32 per_peer;
    u32 nics;                // of every rank
    u32 chunks;              // that a heap lies in: each has keys of its own
    u32 chunk_log2;          // bytes of a chunk
    u64 key_offset;          // bytes of the first chunk that lie before the heap, the same on all ranks
    u64 max_bytes;           // of one request
    u64 heap;                // this rank's heap as its NICs address it
    const u64* heaps;        // [ranks] each rank's heap as the NICs address it from afar
    const u32* keys;         // [chunks, nics]
    const u32* remote_keys;  // [ranks, chunks, nics]
};

namespace ibgda {

using device::Scope;
namespace mlx5 = wire::mlx5;

// --- what the NIC has done ------------------------------------------------------------------------------------------

// One thread. Blocks that are done: at least `known` and what the completion says. The acquire pairs with the NIC's
// release of the completion: it has read the requests' blocks and what they send. Litmus: nic_completion. Requests are
// completed in order, so it does not matter whose request the completion is of.
DEEP_EP_DEVICE u64 completed_after(const QueuePair& qp, u64 known) {
    const u32 tail = device::load_acquire<Scope::kSystem>(&qp.cqe->tail);
    // Of a request that failed nothing is done; the waiter finds it (fault).
    if (mlx5::cqe_kind(tail) == mlx5::kRequestError) return known;
    // At most half as many blocks as the NIC's counter can tell apart are ever on their way.
    return known + ((mlx5::cqe_index(tail) + 1 - known) & 0xffff);
}

// Looks only, and may say yes too early: note_completed() decides. So the completion may be older than `completed`.
DEEP_EP_DEVICE bool looks_completed(const QueuePair& qp, u64 count) {
    const u64 known = device::load_relaxed<Scope::kDevice>(qp.completed);
    return known >= count || completed_after(qp, known) >= count;
}

// One thread: the same, and remembers.
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

// --- telling the NIC ------------------------------------------------------------------------------------------------

// One thread: tells the NIC of all that is filled.
DEEP_EP_DEVICE void ring(const QueuePair& qp) {
    const QueuePair here = qp;
    // No thread blocks while it holds the lock, ours or NVSHMEM's, so this wait ends by itself: unlike that for
    // `filled`, which goes through code of the holder's that waits for the NIC. A thread that finds the lock taken must
    // wait for it: the holder may have read `filled` before this thread's blocks were filled. The next holder sees what
    // the lock guards, also where the one before was another library's: it acquires what that one has released with the
    // lock, and has nothing to release itself yet. Litmus: ring_lock.
    do {
        device::spin_until([&] { return device::load_relaxed<Scope::kDevice>(here.ringing) == 0; }, ~0ull, nullptr);
    } while (device::cas_acquire<Scope::kDevice>(here.ringing, 0u, 1u) != 0);
    // Acquire: the blocks of all threads that have made theirs valid; the record's release hands them on to the NIC.
    const u64 filled = device::load_acquire<Scope::kDevice>(here.filled);
    if (filled > *here.rung) {  // stored under the lock alone
        // The NIC may serve an earlier doorbell and read this record: so the record, not only the doorbell, is what
        // releases the blocks. Litmus: ibgda_record_release.
        device::store_release<Scope::kSystem>(here.record, mlx5::send_counter(filled));
        // Behind the record, which the NIC reads when the doorbell has reached it.
        device::store_release<Scope::kSystem>(here.doorbell, mlx5::doorbell(here.number, filled));
        // It grows under the lock alone, so a store will do; those who look at it without the lock take it for a hint.
        device::store_relaxed<Scope::kDevice>(here.rung, filled);
        *here.rings += 1;
    }
    device::store_release<Scope::kDevice>(here.ringing, 0u);
}

// One thread: until so many blocks are done. False: the waiter has given up.
template <class Waiter>
DEEP_EP_DEVICE bool await_completed(const QueuePair& qp, Waiter& waiter, wire::Phase phase, u64 count) {
    while (!note_completed(qp, count)) {
        const auto unrung = [&] {
            return device::load_relaxed<Scope::kDevice>(qp.filled) > device::load_relaxed<Scope::kDevice>(qp.rung);
        };
        // Others leave the doorbell to those behind them, such as this one.
        if (unrung()) ring(qp);
        const bool going_on = waiter.wait(phase, static_cast<i32>(qp.peer), qp.completed, count,
                                          [&] { return looks_completed(qp, count) || unrung(); });
        if (!going_on) return false;
    }
    return true;
}

// --- room in the ring -----------------------------------------------------------------------------------------------

// One thread: takes `count` blocks that follow each other, once they are free: the requests that had lain there are
// done. The host ensures that so many fit. False: the waiter has given up, and nothing has been taken.
template <class Waiter>
DEEP_EP_DEVICE bool reserve(const QueuePair& qp, Waiter& waiter, u32 count, u64& begin) {
    // Only hands out blocks: `completed`, acquired in the wait, says that they are free, and `filled` orders them.
    u64* const reserved = qp.reserved;
    begin = device::load_relaxed<Scope::kDevice>(reserved);
    for (;;) {
        const u64 end = begin + count;
        if (end > qp.blocks && !await_completed(qp, waiter, wire::Phase::kPost, end - qp.blocks)) return false;
        // There is room for these blocks from now on, since `completed` only grows; are they still to be had?
        const u64 found = device::cas_relaxed<Scope::kDevice>(reserved, begin, end);
        if (found == begin) return true;
        begin = found;
    }
}

// --- requests -------------------------------------------------------------------------------------------------------

// Bytes from an offset of a heap to the end of its chunk.
DEEP_EP_DEVICE u64 rest_of_chunk(const Ibgda& net, u64 offset) {
    const u64 chunk = 1ull << net.chunk_log2;
    return chunk - ((offset + net.key_offset) & (chunk - 1));
}

// Bytes that one request may carry of a piece from `done` on: keys end with their chunks, here and there.
DEEP_EP_DEVICE u64 next_cut(const Ibgda& net, const Piece& piece, u64 done) {
    const u64 bytes = min(min(piece.bytes - done, net.max_bytes), rest_of_chunk(net, piece.source + done));
    return min(bytes, rest_of_chunk(net, piece.target + done));
}

DEEP_EP_DEVICE u64 chunk_of(const Ibgda& net, u64 offset) { return (offset + net.key_offset) >> net.chunk_log2; }
DEEP_EP_DEVICE u32 key(const Ibgda& net, const QueuePair& qp, u64 offset) {
    return net.keys[chunk_of(net, offset) * net.nics + qp.nic];
}
DEEP_EP_DEVICE u32 remote_key(const Ibgda& net, const QueuePair& qp, u64 offset) {
    const u64 chunk = static_cast<u64>(qp.peer) * net.chunks + chunk_of(net, offset);
    return net.remote_keys[chunk * net.nics + qp.remote_nic];
}

DEEP_EP_DEVICE mlx5::Block& block_at(const QueuePair& qp, u64 index) { return qp.ring[index & (qp.blocks - 1)]; }

DEEP_EP_DEVICE void write_request(const Ibgda& net, const QueuePair& qp, u64 index, u64 source, u64 target, u64 bytes) {
    mlx5::Block& block = block_at(qp, index);
    block.control = mlx5::control(mlx5::kRdmaWrite, index, qp.number, mlx5::kUnitsOfWrite, false);
    block.remote = mlx5::remote_address(net.heaps[qp.peer] + target, remote_key(net, qp, target));
    block.data = mlx5::data(net.heap + source, key(net, qp, source), static_cast<u32>(bytes));
}

// With a completion: of a put's requests the last one reports, for all before it.
DEEP_EP_DEVICE void add_request(const Ibgda& net, const QueuePair& qp, u64 index, Word word) {
    mlx5::Block& block = block_at(qp, index);
    block.control = mlx5::control(mlx5::kFetchAdd, index, qp.number, mlx5::kUnitsOfFetchAdd, true);
    block.remote = mlx5::remote_address(net.heaps[qp.peer] + word.offset, remote_key(net, qp, word.offset));
    block.atomic = mlx5::fetch_add(wire::kUnit);
    block.returned = mlx5::data(qp.returned, qp.returned_key, sizeof(u64));
}

}  // namespace ibgda

// One thread. What the pieces hold is ordered before. All puts to one word take the same queue pair.
template <class Waiter>
DEEP_EP_DEVICE_CALL bool post(const Peers&, const Ibgda& net, Waiter& waiter, Completion&, u32 to, const Piece* pieces,
                              u32 count, Word word) {
    using namespace ibgda;
    const QueuePair& qp = net.queue_pairs[to * net.per_peer + word.number % net.per_peer];
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
            write_request(net, qp, index++, pieces[i].source + done, pieces[i].target + done, bytes);
            done += bytes;
        }
    }
    add_request(net, qp, index, word);
    // In order: this acquires the blocks of the threads before, and the store below releases them and these blocks to
    // the thread that rings. Litmus: ibgda_fill_in_order.
    //
    // What is taken is published, though the operation be given up meanwhile (P14). The turn comes whatever the NIC
    // does: these blocks were free when they were taken, so those before them are free too, also another library's, and
    // their threads wait for nothing else. There is a bound nonetheless, for a thread of another library that hangs.
    u64* const filled = qp.filled;
    const u64* const reserved = qp.reserved;
    const auto our_turn = [&] { return device::load_acquire<Scope::kDevice>(filled) == begin; };
    if (!waiter.outlast(wire::Phase::kPost, static_cast<i32>(to), filled, begin, our_turn)) return false;
    device::store_release<Scope::kDevice>(filled, end);
    // A thread that has taken blocks behind these will fill them, and then make this check itself. But one of another
    // library may wait for room first, for requests that no one has rung for: so there is a bound to what is left to
    // it. Relaxed: a count that is too low only rings once more.
    if (device::load_relaxed<Scope::kDevice>(reserved) == end ||
        end > device::load_relaxed<Scope::kDevice>(qp.rung) + qp.blocks / 4) {
        ring(qp);
    }
    return true;
}

// The block, after all posting threads have been joined: each thread waits for its share of the queue pairs, since
// one thread's walk over all of them would pay a memory latency for each. True: the NIC has read all that was posted to
// these; the block's next barrier makes that true of all.
template <class Waiter>
DEEP_EP_DEVICE_CALL bool quiet(const Peers& peers, const Ibgda& net, Waiter& waiter, Completion&) {
    using namespace ibgda;
    for (u32 i = threadIdx.x; i < peers.ranks * net.per_peer; i += blockDim.x) {
        const QueuePair& qp = net.queue_pairs[i];
        if (qp.cqe == nullptr) continue;  // not used
        // What is on its way to a rank that is masked does not arrive: what it is read from may change.
        if (waiter.masked(qp.peer)) continue;
        const u64 filled = device::load_relaxed<Scope::kDevice>(qp.filled);
        if (!await_completed(qp, waiter, wire::Phase::kQuiet, filled) && !waiter.masked(qp.peer)) return false;
    }
    return true;
}

// One thread: a queue pair whose completion tells of an error does nothing any more, also where that request was
// another library's.
DEEP_EP_DEVICE bool fault(const Peers& peers, const Ibgda& net, Fault& found) {
    using namespace ibgda;
#pragma unroll 1
    for (u32 i = 0; i < peers.ranks * net.per_peer; ++i) {
        const QueuePair& qp = net.queue_pairs[i];
        if (qp.cqe == nullptr) continue;  // not used
        // Acquire: the NIC has written the rest before; what it writes later are errors too.
        const u32 tail = device::load_acquire<Scope::kSystem>(&qp.cqe->tail);
        if (mlx5::cqe_kind(tail) != mlx5::kRequestError) continue;
        found = {qp.peer, mlx5::cqe_index(tail), static_cast<u64>(qp.cqe->vendor) << 8 | qp.cqe->syndrome};
        return true;
    }
    return false;
}

}  // namespace deep_ep::fabric
