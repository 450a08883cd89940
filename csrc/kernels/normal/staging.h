// Rows that go through the receiver's region: chunks, each in one of the kSlots slots of its row stream (the rows from
// one source to one destination). Each slot has its own signal word, so that chunks may arrive in any order.
//
// Chunk c of a row stream takes slot c mod kSlots. The k-th chunk of a slot may be sent once the receiver has given
// back the one before (`next`, P6); the last one is not given back. Every (row stream, slot) is served by one block,
// which polls all it serves and blocks on none (P11), so any number of blocks works.
#pragma once

#include "kernels/common/turns.h"
#include "kernels/normal/bounds.h"

namespace deep_ep {

// Entries of the row streams: one for each direction, rank and slot.
constexpr u32 stream_entries(u32 ranks, bool receives) { return (receives ? 2 : 1) * ranks * wire::kSlots; }

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

// The row streams of a rank, as the work of blocks that take turns. `Chunks` fills chunks and places them. `sends(r)`
// and `receives(r)` return whether there is a row stream to or from rank r.
template <class Chunks, class Sends, class Receives>
class StreamWork {
  public:
    // `range`: in shared memory.
    DEEP_EP_DEVICE StreamWork(Operation& op, const wire::RegionLayout& layout, Chunks& chunks, Sends sends,
                              Receives receives, RowRange* range)
        : op_(op), layout_(layout), chunks_(chunks), sends_(sends), receives_(receives), range_(*range) {}

    DEEP_EP_DEVICE u32 entries() const { return stream_entries(op_.ranks(), Chunks::kReceives); }
    DEEP_EP_DEVICE u32 steps(u32 entry) const {
        const StreamSlot stream = at(entry);
        if (stream.sending) {
            return sends_(stream.peer) ? chunks_in_slot(chunks_.sent_chunks(stream.peer), stream.slot) : 0;
        }
        if constexpr (Chunks::kReceives) {
            return receives_(stream.peer) ? chunks_in_slot(chunks_.received_chunks(stream.peer), stream.slot) : 0;
        }
        return 0;
    }
    DEEP_EP_DEVICE Pending blocked(u32 entry, u32 n) const {
        const Pending pending = awaited(at(entry), n);
        return pending.looks_over() ? Pending::none() : pending;
    }
    DEEP_EP_DEVICE bool open(u32 entry, u32 n) {
        const StreamSlot stream = at(entry);
        const u32 peer = stream.peer, chunk = chunk_of(stream, n);
        if (device::lane() == 0) awaited(stream, n).acquire();
        if (stream.sending) return chunks_.find_rows(peer, chunk, range_);
        if constexpr (Chunks::kReceives) {
            if (device::lane() == 0) range_ = chunks_.due_rows(peer, chunk);
            return broadcast(device::lane() == 0 && came_as_due(peer, chunk)) != 0;
        }
        return false;
    }
    DEEP_EP_DEVICE void step(u32 entry, u32 n) {
        const StreamSlot stream = at(entry);
        const u32 peer = stream.peer, chunk = chunk_of(stream, n);
        if (stream.sending) {
            chunks_.fill(message_to(peer, chunk), peer, range_);
        } else if constexpr (Chunks::kReceives) {
            chunks_.place(slot_of(peer, chunk), peer, range_);
        }
    }
    DEEP_EP_DEVICE void close(u32 entry, u32 n) {
        const StreamSlot stream = at(entry);
        const u32 chunk = chunk_of(stream, n);
        if (stream.sending) {
            send(stream.peer, chunk);
        } else if constexpr (Chunks::kReceives) {
            // All threads have read the slot before it is released to its writer. Litmus: slot_given_back.
            const bool last = chunk + wire::kSlots >= chunks_.received_chunks(stream.peer);
            if (!last && device::lane() == 0) op_.signal(stream.peer, wire::kNext + stream.slot);
        }
    }

  private:
    DEEP_EP_DEVICE StreamSlot at(u32 entry) const { return StreamSlot::at(entry, op_.ranks()); }
    DEEP_EP_DEVICE static u32 chunk_of(const StreamSlot& stream, u32 n) { return stream.slot + n * wire::kSlots; }
    // Sending waits for `next`, except for a slot's first chunk; receiving waits for the chunk itself.
    DEEP_EP_DEVICE Pending awaited(const StreamSlot& stream, u32 n) const {
        const u32 peer = stream.peer;
        return stream.sending ? Pending::of(op_, Phase::kNext, peer, wire::kNext + stream.slot, peer, n)
                              : Pending::of(op_, Phase::kChunk, peer, wire::kChunk + stream.slot, peer, n + 1);
    }
    DEEP_EP_DEVICE const u8* slot_of(u32 from, u32 chunk) const {
        return op_.local_region() + layout_.chunk(from, chunk % wire::kSlots);
    }
    // Where a chunk is built: in the peer's slot if that is mapped, otherwise in this rank's own region.
    DEEP_EP_DEVICE u64 source_of(u32 to, u32 chunk) const {
        return op_.region_offset() + layout_.chunk_send(to, chunk % wire::kSlots);
    }
    DEEP_EP_DEVICE u64 target_of(u32 chunk) const {
        return op_.region_offset() + layout_.chunk(op_.rank(), chunk % wire::kSlots);
    }
    DEEP_EP_DEVICE u8* message_to(u32 to, u32 chunk) const {
        return op_.maps(to) ? fabric::address(op_.peers(), to, target_of(chunk))
                            : op_.peers().local + source_of(to, chunk);
    }
    // One thread: returns whether the chunk that has arrived belongs to this operation and holds the rows that are due.
    DEEP_EP_DEVICE bool came_as_due(u32 from, u32 chunk) const {
        const auto header = copy_once<wire::ChunkHeader>(slot_of(from, chunk));
        if (!op_.check_message(Phase::kChunk, from, header.operation, header.arguments)) return false;
        if (header.first == range_.first && header.rows == range_.rows) return true;
        op_.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from), u64{range_.first} << 32 | range_.rows,
                 u64{header.first} << 32 | header.rows);
        return false;
    }
    // The first warp: all threads' stores into the chunk come before its release, or before the NIC's reads.
    //
    // A host that has told of a failure lets its caller overwrite rows, of which this kernel may have read some since.
    // The chunk is therefore sent only if this rank has not been told, after all threads' loads: a receiver that is not
    // mapped learns of the failure late (P12).
    DEEP_EP_DEVICE void send(u32 to, u32 chunk) {
        if (!broadcast(device::lane() != 0 || op_.looks_clear())) return;
        if (device::lane() == 0) {
            wire::ChunkHeader header{};
            header.operation = op_.number();
            header.arguments = op_.arguments();
            header.first = range_.first;
            header.rows = range_.rows;
            *reinterpret_cast<wire::ChunkHeader*>(message_to(to, chunk)) = header;
            if (op_.maps(to)) op_.signal(to, wire::kChunk + chunk % wire::kSlots);
        }
        if (op_.maps(to)) return;
        const fabric::Piece piece{source_of(to, chunk), target_of(chunk), layout_.format.bytes(range_.rows)};
        op_.put_signal(to, wire::kChunk + chunk % wire::kSlots, &piece, 1);
    }

    Operation& op_;
    const wire::RegionLayout& layout_;
    Chunks& chunks_;
    const Sends sends_;
    const Receives receives_;
    RowRange& range_;  // the rows of the chunk whose turn it is
};

// Each warp of a block: copies its part of `count` rows, from from(i) to to(i). They may have arrived while this kernel
// runs. Afterwards the copies are complete.
template <class From, class To>
DEEP_EP_DEVICE void copy_rows(device::RowCopies& copies, u32 count, u32 row_bytes, bool streaming, From from, To to) {
    const u32 step = device::warps();
    copies.read_what_came();
    if (device::warp() < count) copies.load(from(device::warp()), row_bytes);
    for (u32 i = device::warp(); i < count; i += step) {
        if (i + step < count) copies.load(from(i + step), row_bytes);
        u8* const target = to(i);
        copies.to_many(&target, 1, from(i), row_bytes, streaming);
    }
    copies.finish();
}

// One thread: ends this operation's use of the words of the row streams with `peer`.
DEEP_EP_DEVICE void consume_stream(Operation& op, u32 peer, u32 sent, u32 received) {
    for (u32 slot = 0; slot < wire::kSlots; ++slot) {
        op.consume(wire::kNext + slot, peer, slots_given_back(sent, slot, wire::kSlots));
        op.consume(wire::kChunk + slot, peer, chunks_in_slot(received, slot));
    }
}

}  // namespace deep_ep
