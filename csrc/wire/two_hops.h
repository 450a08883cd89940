// Messages of normal mode in two hops, and how its operations lay themselves out in their region: see docs/two_hops.md.
//
// There are `nodes` nodes of `per_node` ranks; rank r is rank r % per_node, its local index, of node r / per_node.
#pragma once

#include "wire/forwarders.h"
#include "wire/messages.h"

namespace deep_ep::wire {

// Chunk slots of a stream inside a node: from an origin's forwarder to a receiver, or back from a producer.
constexpr u32 kLocalSlots = 2;
static_assert(kRoles * kLocalSlots <= kStreamWords, "a signal word for each");
static_assert(kRoles == 2, "TwoHopSizes::role_of()");

// The ranks of a node that a node row is for: a bit each.
constexpr u32 kSetBits = 32;
constexpr u32 set_words(u32 per_node) { return ceil_div(per_node, kSetBits); }
// Of every so many node rows of a stream it is noted how many rows for each rank come before.
constexpr u32 kMarkRows = 32;

// A rank forwards up to one stream from each node for each of its roles: for its own local index, and if ranks are
// masked perhaps for another one (wire/forwarders.h). These are its lines: line `role * nodes + node` is the stream
// from that node, line `own node` its own.

// What a rank tells a forwarder of the stream that comes, and a forwarder each rank of its node of all its lines:
// a NotifyHeader, whose `tokens` are the node rows of the stream, and a RankMask, as in a notify message of one hop.
// Behind them:
//
//   to a forwarder   i32 rows[per_node], then i32 rows_to_expert[experts of the node]
//   inside a node    i32 rows[lines], i32 node_rows[lines], then i32 rows_to_expert[experts of the receiver]

// Rows of a stream at one receiver, told with the receiver's offer, one for each line of the forwarder: where the
// stream's rows begin in the output (or among the published rows), and how many there are.
struct StreamRows {
    u32 first;
    u32 rows;
};
static_assert(sizeof(StreamRows) == sizeof(u64), "read as a word");

// What an operation's layout depends on, the same on all ranks.
struct TwoHopSizes {
    u32 nodes;
    u32 per_node;
    u32 roles;          // of a forwarder: 1 if no rank is masked, else 2
    u32 experts;        // of all ranks; 0: the operation exchanges no counts
    u32 chunk_rows;     // most node rows of a chunk
    u32 with_sets;      // chunks between nodes say which ranks each node row is for
    ChunkFormat rail;   // between nodes
    ChunkFormat local;  // inside a node

    constexpr u32 ranks() const { return nodes * per_node; }
    constexpr u32 others() const { return nodes - 1; }
    constexpr u32 lines() const { return roles * nodes; }
    // The place of a node among all but `own`, and back.
    constexpr u32 place(u32 node, u32 own) const { return node < own ? node : node - 1; }
    constexpr u32 node_at(u32 place, u32 own) const { return place < own ? place : place + 1; }
    // Of a line.
    constexpr u32 role_of(u32 line) const { return line < nodes ? 0 : 1; }
    constexpr u32 node_of(u32 line) const { return line < nodes ? line : line - nodes; }
    // The place of a line among those from other nodes, and back.
    constexpr u32 place(u32 role, u32 node, u32 own) const { return role * others() + place(node, own); }
    constexpr u32 line_at(u32 place, u32 own) const {
        return place < others() ? node_at(place, own) : nodes + node_at(place - others(), own);
    }
    constexpr u32 experts_per_rank() const { return experts / ranks(); }
    constexpr u32 chunks(u32 node_rows) const {
        // A stream without rows still sends one chunk, its header (P7).
        return node_rows == 0 ? 1 : ceil_div(node_rows, chunk_rows);
    }
    constexpr u32 rows_of_chunk(u32 chunk, u32 node_rows) const {
        const u32 left = node_rows - chunk * chunk_rows;
        return left < chunk_rows ? left : chunk_rows;
    }

    // --- messages
    static constexpr u64 counts_bytes(u64 count) { return align_up(count * sizeof(i32), kPieceBytes); }
    constexpr u64 rail_experts() const { return kNotifyCounts + counts_bytes(per_node); }
    constexpr u64 rail_counts_bytes() const {
        return rail_experts() + counts_bytes(u64{per_node} * experts_per_rank());
    }
    constexpr u64 local_node_rows() const { return kNotifyCounts + counts_bytes(lines()); }
    constexpr u64 local_experts() const { return local_node_rows() + counts_bytes(lines()); }
    constexpr u64 local_counts_bytes() const { return local_experts() + counts_bytes(experts_per_rank()); }
    constexpr u64 offer_bytes() const {
        return align_up(sizeof(Offer) + u64{lines()} * sizeof(StreamRows), kPieceBytes);
    }
    // Behind the rows of a chunk between nodes: the index of its first row for each rank, then the sets.
    constexpr u64 firsts_offset(u32 rows) const { return rail.bytes(rows); }
    constexpr u64 sets_offset(u32 rows) const {
        return firsts_offset(rows) + (with_sets != 0 ? counts_bytes(per_node) : 0);
    }
    constexpr u64 rail_bytes(u32 rows) const {
        return sets_offset(rows) + (with_sets != 0 ? counts_bytes(u64{rows} * set_words(per_node)) : 0);
    }
};

// Messages of one kind, one behind the other.
struct Messages {
    u64 begin;  // in the region
    u64 bytes;  // of each

    constexpr u64 at(u64 index) const { return begin + index * bytes; }
    constexpr Messages behind(u64 count, u64 next_bytes) const { return {at(count), next_bytes}; }
};

// Where things lie in the region. Computed by the host, since every kernel needs it at many places.
struct TwoHopLayout : TwoHopSizes {
    // Received counts: of the lines from other nodes; from the ranks of the own node, by local index; and their offers.
    Messages rail_counts, local_counts, offers;
    Messages rail_chunks;   // received: see rail_chunk()
    Messages local_chunks;  // likewise
    // Messages under construction, where the wire takes them from this rank's memory. The counts by place of the node.
    Messages rail_counts_send, rail_chunks_send;
    u64 bytes;

    static constexpr TwoHopLayout of(const TwoHopSizes& sizes) {
        TwoHopLayout layout{};
        static_cast<TwoHopSizes&>(layout) = sizes;
        const u64 others = sizes.others(), lines = others * sizes.roles, slots = lines * kSlots;
        const u64 chunk = sizes.rail_bytes(sizes.chunk_rows);
        layout.rail_counts = {0, sizes.rail_counts_bytes()};
        layout.local_counts = layout.rail_counts.behind(lines, sizes.local_counts_bytes());
        layout.offers = layout.local_counts.behind(sizes.per_node, sizes.offer_bytes());
        layout.rail_chunks = layout.offers.behind(sizes.per_node, chunk);
        layout.local_chunks = layout.rail_chunks.behind(slots, sizes.local.bytes(sizes.chunk_rows));
        layout.rail_counts_send =
            layout.local_chunks.behind(u64{sizes.ranks()} * sizes.roles * kLocalSlots, sizes.rail_counts_bytes());
        layout.rail_chunks_send = layout.rail_counts_send.behind(others, chunk);
        layout.bytes = layout.rail_chunks_send.at(slots);
        return layout;
    }

    // By place of a line; what comes back to an owner has those of role 0.
    constexpr u64 rail_chunk(u32 place, u32 slot) const { return rail_chunks.at(place * kSlots + slot); }
    constexpr u64 rail_chunk_send(u32 place, u32 slot) const { return rail_chunks_send.at(place * kSlots + slot); }
    // Dispatch: of an origin. Combine, by role of the forwarder: `stream` is node of the owner * per_node + local index
    // of the producer.
    constexpr u64 local_chunk(u32 stream, u32 slot, u32 role = 0) const {
        return local_chunks.at((role * ranks() + stream) * kLocalSlots + slot);
    }
};

}  // namespace deep_ep::wire
