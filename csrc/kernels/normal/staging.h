// Rows that go through the receiver's region: chunks, each in one of the kSlots slots of its row stream (the rows from
// one source to one destination). Each slot has its own signal word, so that chunks may arrive in any order.
//
// Chunk c of a row stream takes slot c mod kSlots. The k-th chunk of a slot may be sent once the receiver has given
// back the one before (`next`, P6); the last one is not given back. Every (row stream, slot) is served by one warp,
// which polls all it serves and blocks on none (P11), so any number of warps works.
#pragma once

#include "kernels/common/polling.h"
#include "kernels/normal/bounds.h"

namespace deep_ep {

// Per block: the next chunk of each (row stream, slot). Each warp uses only its own entries.
constexpr u32 stream_progress_words(u32 ranks) { return 2 * ranks * wire::kSlots; }

// Number of chunks that take `slot`, in a row stream of `chunks` chunks.
constexpr u32 chunks_in_slot(u32 chunks, u32 slot, u32 slots = wire::kSlots) {
    return chunks > slot ? (chunks - slot - 1) / slots + 1 : 0;
}
static_assert(chunks_in_slot(1, 0) == 1 && chunks_in_slot(1, 1) == 0 && chunks_in_slot(wire::kSlots + 1, 0) == 2,
              "chunks per slot");
// Number of times a slot is given back: its last chunk is not.
constexpr u32 slots_given_back(u32 chunks, u32 slot, u32 slots) {
    const u32 used = chunks_in_slot(chunks, slot, slots);
    return used != 0 ? used - 1 : 0;
}

// One direction of a rank's traffic with one peer in one slot.
struct StreamSlot {
    u32 peer;
    u32 slot;
    bool sending;

    // Entries [0, ranks * kSlots) send, the rest receive.
    DEEP_EP_DEVICE static StreamSlot at(u32 index, u32 ranks) {
        const u32 sends = ranks * wire::kSlots;
        const u32 local = index < sends ? index : index - sends;
        return {local / wire::kSlots, local % wire::kSlots, index < sends};
    }
};

// A warp: builds chunk `chunk` for `to`, directly in the peer's slot if that is mapped, otherwise in this rank's own
// region, and sends it.
template <class Chunks>
DEEP_EP_DEVICE void send_chunk(Operation& op, const wire::RegionLayout& layout, const Chunks& chunks, u32 to,
                               u32 chunk) {
    const u32 slot = chunk % wire::kSlots;
    const u64 source = op.region_offset() + layout.chunk_send(to, slot);
    const u64 target = op.region_offset() + layout.chunk(op.rank(), slot);
    u8* message = fabric::mapped(op.peers(), to) ? fabric::address(op.peers(), to, target) : op.peers().local + source;
    RowRange range{};
    int fits = 1;
    if (device::lane() == 0) fits = chunks.rows_to_send(to, chunk, range);
    if (!broadcast(fits)) return;
    const u32 first = __shfl_sync(device::kFullMask, range.first, 0);
    const u32 rows = __shfl_sync(device::kFullMask, range.rows, 0);
    if (device::lane() == 0) {
        wire::ChunkHeader header{};
        header.operation = op.number();
        header.arguments = op.arguments();
        header.first = first;
        header.rows = rows;
        *reinterpret_cast<wire::ChunkHeader*>(message) = header;
    }
    chunks.fill(message, to, first, rows);
    if (fabric::mapped(op.peers(), to)) {
        __syncwarp();  // all lanes' stores into the peer's slot come before lane 0's release
        if (device::lane() == 0) op.signal(to, wire::kChunk + slot);
    } else {
        const fabric::Piece piece{source, target, layout.format.bytes(rows)};
        op.put_signal(to, wire::kChunk + slot, &piece, 1);
    }
}

// A warp: places chunk `chunk` of `from` and gives its slot back if another chunk will come.
template <class Chunks>
DEEP_EP_DEVICE void receive_chunk(Operation& op, const wire::RegionLayout& layout, const Chunks& chunks, u32 from,
                                  u32 chunk) {
    const u32 slot = chunk % wire::kSlots;
    const u8* message = op.local_region() + layout.chunk(from, slot);
    const RowRange due = chunks.rows_to_receive(from, chunk);
    int ours = 1;
    if (device::lane() == 0) {
        const auto header = copy_once<wire::ChunkHeader>(message);
        ours = op.check_message(Phase::kChunk, from, header.operation, header.arguments);
        if (ours && (header.first != due.first || header.rows != due.rows)) {
            op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from), u64{due.first} << 32 | due.rows,
                    u64{header.first} << 32 | header.rows);
            ours = 0;
        }
    }
    if (!broadcast(ours)) return;
    chunks.place(message, from, due.first, due.rows);
    __syncwarp();  // all lanes have read the slot before lane 0 releases it to its writer. Litmus: slot_given_back
    if (chunk + wire::kSlots < chunks.received_chunks(from) && device::lane() == 0) op.signal(from, wire::kNext + slot);
}

// The work of polling warps on row streams: see serve(). `sends(r)` and `receives(r)` return whether there is a row
// stream to or from rank r.
template <class Chunks, class Sends, class Receives>
struct StreamWork {
    Operation& op;
    const wire::RegionLayout& layout;
    const Chunks& chunks;
    Sends sends;
    Receives receives;

    DEEP_EP_DEVICE u32 entries() const { return stream_progress_words(op.ranks()); }
    DEEP_EP_DEVICE u32 steps(u32 entry) const {
        const StreamSlot stream = StreamSlot::at(entry, op.ranks());
        if (stream.sending)
            return sends(stream.peer) ? chunks_in_slot(chunks.sent_chunks(stream.peer), stream.slot) : 0;
        if constexpr (Chunks::kReceives) {
            return receives(stream.peer) ? chunks_in_slot(chunks.received_chunks(stream.peer), stream.slot) : 0;
        }
        return 0;
    }
    // Sending waits for `next`, except for a slot's first chunk; receiving waits for the chunk itself.
    DEEP_EP_DEVICE Pending blocked(u32 entry, u32 n) const {
        const StreamSlot stream = StreamSlot::at(entry, op.ranks());
        const Pending pending =
            stream.sending
                ? Pending::of(op, Phase::kNext, stream.peer, wire::kNext + stream.slot, stream.peer, n)
                : Pending::of(op, Phase::kChunk, stream.peer, wire::kChunk + stream.slot, stream.peer, n + 1);
        return pending.over() ? Pending::none() : pending;
    }
    DEEP_EP_DEVICE void step(u32 entry, u32 n) const {
        const StreamSlot stream = StreamSlot::at(entry, op.ranks());
        const u32 chunk = stream.slot + n * wire::kSlots;
        if (stream.sending) {
            send_chunk(op, layout, chunks, stream.peer, chunk);
        } else if constexpr (Chunks::kReceives) {
            receive_chunk(op, layout, chunks, stream.peer, chunk);
        }
    }
    DEEP_EP_DEVICE bool fill_in() const { return false; }
};

// A warp, the `worker`-th of `workers`: serves its share of this rank's row streams to completion.
template <class Chunks, class Sends, class Receives>
DEEP_EP_DEVICE_CALL void serve_streams(Operation& op, const wire::RegionLayout& layout, const Chunks& chunks,
                                       Sends sends, Receives receives, u32* progress, u32 worker, u32 workers) {
    const StreamWork<Chunks, Sends, Receives> work{op, layout, chunks, sends, receives};
    serve(op, work, Share{progress, worker, workers});
}

// One thread: ends this operation's use of the words of the row streams with `peer`.
DEEP_EP_DEVICE void consume_stream(Operation& op, u32 peer, u32 sent, u32 received) {
    for (u32 slot = 0; slot < wire::kSlots; ++slot) {
        op.consume(wire::kNext + slot, peer, slots_given_back(sent, slot, wire::kSlots));
        op.consume(wire::kChunk + slot, peer, chunks_in_slot(received, slot));
    }
}

}  // namespace deep_ep
