// Messages of normal mode in two hops, and the layout of its operations in their region: see docs/two_hops.md.
//
// There are `nodes` nodes of `per_node` ranks. Rank r belongs to node r / per_node and has the local index r %
// per_node.
#pragma once

#include "wire/forwarders.h"
#include "wire/messages.h"

namespace deep_ep::wire {

// Chunk slots of a row stream inside a node: from an origin's forwarder to a receiver, or back from a producer.
constexpr u32 kLocalSlots = 2;
static_assert(kRoles * kLocalSlots <= kStreamWords, "a signal word for each");
static_assert(kRoles == 2, "TwoHopSizes::role_of()");

// The set of ranks of a node that a node row is for: a bit each.
constexpr u32 kSetBits = 32;
constexpr u32 set_words(u32 per_node) { return ceil_div(per_node, kSetBits); }
// Every kMarkRows node rows of a row stream, a mark records how many rows for each rank precede it.
constexpr u32 kMarkRows = 32;

// A rank forwards up to one row stream from each node for each of its roles: for its own local index, and if ranks are
// masked perhaps for a second one (wire/forwarders.h). These are its lines: line `role * nodes + node` is the row
// stream from that node, and line `own node` is its own.

// A rank announces its row stream to each forwarder, and a forwarder announces all its lines to each rank of its node.
// Both messages begin with a NotifyHeader, whose `tokens` are the node rows of the row stream, and a RankMask, as in a
// notify message of one hop. These follow:
//
//   to a forwarder   i32 rows[per_node], then i32 rows_to_expert[experts of the node]
//   inside a node    i32 rows[lines], i32 node_rows[lines], then i32 rows_to_expert[experts of the receiver]

// The rows of a row stream at one receiver: where they begin in the output (or among the published rows), and how many
// there are. The receiver's offer carries one for each line of the forwarder.
struct StreamRows {
    u32 first;
    u32 rows;
};
static_assert(sizeof(StreamRows) == sizeof(u64), "read as a word");

// The parameters of an operation's layout, the same on all ranks.
struct TwoHopSizes {
    u32 nodes;
    u32 per_node;
    u32 roles;          // per forwarder: 1 if no rank is masked, otherwise 2
    u32 experts;        // of all ranks; 0: the operation exchanges no counts
    u32 chunk_rows;     // the most node rows in a chunk
    u32 with_sets;      // chunks between nodes carry, for each node row, the set of ranks that it is for
    ChunkFormat rail;   // between nodes
    ChunkFormat local;  // inside a node

    constexpr u32 ranks() const { return nodes * per_node; }
    constexpr u32 others() const { return nodes - 1; }
    constexpr u32 lines() const { return roles * nodes; }
    // The index of a node among all but `own`, and the inverse.
    constexpr u32 place(u32 node, u32 own) const { return node < own ? node : node - 1; }
    constexpr u32 node_at(u32 place, u32 own) const { return place < own ? place : place + 1; }
    // Role and node of a line.
    constexpr u32 role_of(u32 line) const { return line < nodes ? 0 : 1; }
    constexpr u32 node_of(u32 line) const { return line < nodes ? line : line - nodes; }
    // The index of a line among those from other nodes, and the inverse.
    constexpr u32 place(u32 role, u32 node, u32 own) const { return role * others() + place(node, own); }
    constexpr u32 line_at(u32 place, u32 own) const {
        return place < others() ? node_at(place, own) : nodes + node_at(place - others(), own);
    }
    constexpr u32 experts_per_rank() const { return experts / ranks(); }
    constexpr u32 chunks(u32 node_rows) const {
        // A row stream without rows still sends one chunk, which is only a header (P7).
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
    // After the rows of a chunk between nodes: the index of its first row for each rank, then the sets.
    constexpr u64 firsts_offset(u32 rows) const { return rail.bytes(rows); }
    constexpr u64 sets_offset(u32 rows) const {
        return firsts_offset(rows) + (with_sets != 0 ? counts_bytes(per_node) : 0);
    }
    constexpr u64 rail_bytes(u32 rows) const {
        return sets_offset(rows) + (with_sets != 0 ? counts_bytes(u64{rows} * set_words(per_node)) : 0);
    }
};

// Contiguous messages of one kind.
struct Messages {
    u64 begin;  // offset in the region
    u64 bytes;  // per message

    constexpr u64 at(u64 index) const { return begin + index * bytes; }
    constexpr Messages behind(u64 count, u64 next_bytes) const { return {at(count), next_bytes}; }
};

// The layout of the region. The host computes it, since kernels need it in many places.
struct TwoHopLayout : TwoHopSizes {
    // Received: counts of the lines from other nodes; counts from the ranks of the own node, by local index; their
    // offers.
    Messages rail_counts, local_counts, offers;
    Messages rail_chunks;   // received: see rail_chunk()
    Messages local_chunks;  // received: see local_chunk()
    // Messages under construction, for networks that read them from this rank's memory. Counts by index of the node.
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

    // `place`: index of a line. Chunks that come back to an owner use the lines of role 0.
    constexpr u64 rail_chunk(u32 place, u32 slot) const { return rail_chunks.at(place * kSlots + slot); }
    constexpr u64 rail_chunk_send(u32 place, u32 slot) const { return rail_chunks_send.at(place * kSlots + slot); }
    // `stream` in dispatch: the origin. In combine: node of the owner * per_node + local index of the producer, for
    // each role of the forwarder.
    constexpr u64 local_chunk(u32 stream, u32 slot, u32 role = 0) const {
        return local_chunks.at((role * ranks() + stream) * kLocalSlots + slot);
    }
};

}  // namespace deep_ep::wire
