// Messages between ranks, and their layout in the region of an operation. Parts of a message are 16-byte aligned.
#pragma once

#include "wire/heap_layout.h"
#include "wire/types.h"

namespace deep_ep::wire {

// The most tokens of one rank, so that the row count of any rank fits into 31 bits.
constexpr u32 kMaxTokens = 0x7fffffffu / kMaxRanks;

// First part of a notify message. It is followed by a RankMask, the ranks that the source leaves out (P17), i32
// rows_to_rank[ranks] (the source's whole row of counts) and i32 rows_to_expert[experts of the receiver].
struct NotifyHeader {
    u64 operation;
    u64 arguments;  // hash of what all ranks must agree on: kind of call, sizes, handle
    u32 generation;
    u32 tokens;  // tokens of the source; they determine the number of rounds of its combine
    // The bytes of the source's heap that its peers must have mapped before they launch the operation's next kernel
    // (P10); 0: no more than before.
    u64 heap_bytes;
    u32 reserved[8];
};
static_assert(sizeof(NotifyHeader) == 64, "notify header");
constexpr u64 kNotifyCounts = sizeof(NotifyHeader) + sizeof(RankMask);
static_assert(kNotifyCounts % kPieceBytes == 0, "parts of a message");

// An offer (P9, P12): where the tensors of an operation are in the sender's heap, so that the receiver may store into
// them (dispatch: the output) or load from them (combine: the published rows). Offsets are into the sender's heap.
struct Offer {
    u64 operation;
    u64 x;
    u64 scales;
    u64 topk_idx;
    u64 topk_weights;
    u64 src_idx;
    u64 arguments;  // as in NotifyHeader
    u32 visible;    // 0: not peer-visible memory; rows go through the region, chunk by chunk
    u32 rows;       // per tensor
    // Not 0: rows go straight into the expanded layout, whose rows these are. `x` is that layout, `topk_idx` takes the
    // slot of each choice, in 32 bits, and what the receiver needs to find them is at RegionLayout::starts.
    u32 expanded_rows;
    u32 reserved[3];
};
static_assert(sizeof(Offer) == 80 && sizeof(Offer) % kPieceBytes == 0, "offer");

// First part of a chunk: rows [first, first + rows) of those that its source sends to its destination.
struct ChunkHeader {
    u64 operation;
    u64 arguments;  // as in NotifyHeader
    u32 first;
    u32 rows;
    u32 reserved[10];
};
static_assert(sizeof(ChunkHeader) == 64, "chunk header");

// The parts of a chunk's rows, in this order, and the bytes of each per row. 0: the part is absent.
struct ChunkFormat {
    u32 x_bytes;
    u32 scales_bytes;
    u32 topk_idx_bytes;
    u32 topk_weights_bytes;
    u32 src_idx_bytes;

    constexpr bool has_topk() const { return topk_idx_bytes != 0; }
    constexpr bool has_weights() const { return topk_weights_bytes != 0; }
    constexpr u64 x_offset() const { return sizeof(ChunkHeader); }
    constexpr u64 scales_offset(u32 rows) const { return x_offset() + static_cast<u64>(rows) * x_bytes; }
    constexpr u64 topk_idx_offset(u32 rows) const {
        return scales_offset(rows) + align_up(static_cast<u64>(rows) * scales_bytes, kPieceBytes);
    }
    constexpr u64 topk_weights_offset(u32 rows) const {
        return topk_idx_offset(rows) + align_up(static_cast<u64>(rows) * topk_idx_bytes, kPieceBytes);
    }
    constexpr u64 src_idx_offset(u32 rows) const {
        return topk_weights_offset(rows) + align_up(static_cast<u64>(rows) * topk_weights_bytes, kPieceBytes);
    }
    constexpr u64 bytes(u32 rows) const {
        return src_idx_offset(rows) + align_up(static_cast<u64>(rows) * src_idx_bytes, kPieceBytes);
    }
};

// The layout of an operation inside its region (P2). Both ends compute it from what all ranks know: Buffer and shape.
struct RegionLayout {
    u32 ranks;
    u32 experts;     // 0: the operation exchanges no counts
    u32 has_remote;  // some pair of ranks of this Buffer is not load/store-reachable: messages are built in the
                     // sender's own region
    u32 chunk_rows;  // rows per chunk
    ChunkFormat format;

    constexpr u64 rank_counts_bytes() const { return align_up(static_cast<u64>(ranks) * sizeof(i32), kPieceBytes); }
    constexpr u64 expert_counts_bytes() const {
        return align_up(static_cast<u64>(experts / ranks) * sizeof(i32), kPieceBytes);
    }
    constexpr u64 notify_common_bytes() const { return kNotifyCounts + rank_counts_bytes(); }
    constexpr u64 notify_row_bytes() const { return notify_common_bytes() + expert_counts_bytes(); }
    // Offsets into the region. Received messages come first, one per source.
    constexpr u64 notify_row(u32 source) const { return source * notify_row_bytes(); }
    constexpr u64 offer(u32 source) const { return notify_row(ranks) + source * sizeof(Offer); }
    // With an offer of the expanded layout: i32 [local experts of its source], where the receiver's rows begin there.
    constexpr u64 starts(u32 source) const { return offer(ranks) + source * expert_counts_bytes(); }
    constexpr u64 chunk_bytes() const { return format.bytes(chunk_rows); }
    constexpr u64 chunk(u32 source, u32 slot) const { return starts(ranks) + (source * kSlots + slot) * chunk_bytes(); }
    // Messages under construction, for networks that read them from this rank's memory.
    constexpr u64 notify_send() const { return chunk(ranks, 0); }
    // The part that is common to all receivers, once, then the expert counts of each receiver.
    constexpr u64 notify_send_bytes() const { return notify_common_bytes() + ranks * expert_counts_bytes(); }
    constexpr u64 chunk_send(u32 destination, u32 slot) const {
        return notify_send() + notify_send_bytes() + (destination * kSlots + slot) * chunk_bytes();
    }
    constexpr u64 bytes() const { return chunk_send(has_remote ? ranks : 0, 0); }
};

}  // namespace deep_ep::wire
