// Messages of low-latency mode and how its operations lay themselves out in their region (PROTOCOL P13). Both ends
// compute all places from what all ranks know: Buffer and sizes. No place depends on how many tokens a call has.
//
//   dispatch   routing of each source | this rank's rows, for ranks that are mapped to read | rows of sources in each
//              other node
//   combine    header of each source | rows that mapped sources publish | slots of mapped sources | of the others |
//              rests of all slots | sums from each other node
//
// Results that travel as LogFMT (device/logfmt.h) have their heads in the slots.
//
// Where some rank is not mapped, what is sent to such ranks is built behind that, in the sender's own region, likewise
// for each destination.
//
// Rows go once to each node: to its forwarder for the sender, the rank there with the sender's local index, in whose
// region the node's other ranks read them. A node is `per_node` ranks that are mapped to each other; 1: each rank is
// its own forwarder. If the source has sent the weights of its choices with them, the forwarder also sums the node's
// results for it.
#pragma once

#include "wire/heap_layout.h"
#include "wire/types.h"

namespace deep_ep::wire {

// Tokens whose places are found together: which of them an expert has is one word.
constexpr u32 kUnitTokens = 32;

// Puts that carry a source's rows to a rank that is not mapped. Signalled by the words of as many chunk slots.
constexpr u32 kMaxRowPuts = 3;
static_assert(kMaxRowPuts <= kSlots && kMaxRowPuts <= kStreamWords, "a signal word for each");

// An expert's id as routings carry it.
using RoutedId = u16;
constexpr RoutedId kNoExpert = 0xffff;
constexpr u32 kMaxRoutedExperts = kNoExpert;

// First part of a routing, which says where a source's tokens go. Followed by u32 counts[experts of the receiver], the
// source's tokens for each, and RoutedId[tokens][top-k], the same for all receivers. Behind them the source's
// forwarders get f32 weights[tokens][top-k], if there are any.
struct RoutingHeader {
    u64 operation;
    u64 arguments;  // hash of what all ranks must agree on
    u32 tokens;     // of the source
    // Where the results for this source begin that the receiver sends in its combine, among those of all ranks; for
    // ranks that are not mapped.
    u32 first_result;
    u32 reserved[10];
};
static_assert(sizeof(RoutingHeader) == 64, "routing header");

// Of one rank's results for another, in combine.
struct ResultHeader {
    u64 operation;
    u64 arguments;
    u64 published;  // where in its heap the rank's results lie, for the other to read there; kUnpublished: in slots
    u32 reserved[10];
};
constexpr u64 kUnpublished = ~0ull;
static_assert(sizeof(ResultHeader) == 64, "result header");

// A slot for a result and the rank at its other end: of a row received in a dispatch, where it came from and where its
// result goes there; of a choice, whose result it is and where it comes.
constexpr u32 kSlotBits = 22;
constexpr u32 kMaxResults = (1u << (kSlotBits - 1)) - 1;  // of a rank: tokens times top-k; there are two slots for each
constexpr u32 kNoPosition = ~0u;
constexpr u32 position(u32 rank, u32 slot) { return rank << kSlotBits | slot; }
constexpr u32 position_rank(u32 position) { return position >> kSlotBits; }
constexpr u32 position_slot(u32 position) { return position & ((1u << kSlotBits) - 1); }
static_assert(kMaxRanks <= 1u << (32 - kSlotBits), "a rank and a slot fit into a position");
static_assert(position_rank(position(kMaxRanks - 1, 2 * kMaxResults - 1)) == kMaxRanks - 1 &&
                  position_slot(position(kMaxRanks - 1, 2 * kMaxResults - 1)) == 2 * kMaxResults - 1 &&
                  position(kMaxRanks - 1, 2 * kMaxResults - 1) != kNoPosition,
              "position: 10 bits of rank, 22 of slot");

struct LowLatencyLayout {
    u32 ranks;
    u32 max_tokens;  // of a rank
    u32 topk;
    u32 experts_per_rank;
    u32 x_bytes;       // of a row of dispatch
    u32 scales_bytes;  // 0: rows have none
    u32 result_bytes;  // of a row of combine, or of its head
    u32 rest_bytes;    // of the rest of such a row; 0: results travel as they are
    u32 has_remote;    // some pair of ranks of this Buffer is not load/store-reachable
    u32 row_puts;      // 1 to kMaxRowPuts
    u32 per_node;      // ranks of a node
    u32 weighted;      // routings have weights; results are summed where they are, and their sums sent

    constexpr u32 nodes() const { return ranks / per_node; }
    constexpr u32 node_of(u32 rank) const { return rank / per_node; }
    constexpr u32 forwarder(u32 node, u32 rank) const { return node * per_node + rank % per_node; }
    constexpr u32 experts_per_node() const { return per_node * experts_per_rank; }
    constexpr bool forwards_rows() const { return per_node > 1; }
    constexpr bool sums_remotely() const { return weighted != 0 && has_remote != 0; }
    constexpr bool same_local_index(u32 rank, u32 other) const { return rank % per_node == other % per_node; }

    constexpr u64 max_results() const { return static_cast<u64>(max_tokens) * topk; }
    // That one rank sends another.
    constexpr u64 max_results_of_rank() const {
        return static_cast<u64>(max_tokens) * (topk < experts_per_rank ? topk : experts_per_rank);
    }
    // Tokens whose rows go with one put, whole units. The last put may have fewer.
    constexpr u32 tokens_per_put() const { return ceil_div(ceil_div(max_tokens, kUnitTokens), row_puts) * kUnitTokens; }

    // --- dispatch
    constexpr u64 counts_bytes() const {
        return align_up(static_cast<u64>(experts_per_rank) * sizeof(u32), kPieceBytes);
    }
    constexpr u64 ids_bytes(u32 tokens) const {
        return align_up(static_cast<u64>(tokens) * topk * sizeof(RoutedId), kPieceBytes);
    }
    constexpr u64 weights_bytes(u32 tokens) const {
        return weighted != 0 ? align_up(static_cast<u64>(tokens) * topk * sizeof(float), kPieceBytes) : 0;
    }
    constexpr u64 ids_offset() const { return sizeof(RoutingHeader) + counts_bytes(); }
    constexpr u64 weights_offset(u32 tokens) const { return ids_offset() + ids_bytes(tokens); }
    constexpr u64 routing_bytes(u32 tokens) const { return weights_offset(tokens) + weights_bytes(tokens); }
    constexpr u64 row_bytes() const { return align_up(static_cast<u64>(x_bytes) + scales_bytes, kPieceBytes); }
    constexpr u64 rows_bytes() const { return max_tokens * row_bytes(); }
    constexpr u64 routing(u32 source) const { return source * routing_bytes(max_tokens); }
    // Of this rank, each at its token's place. All ranks have read them when all have given `free`.
    constexpr u64 own_rows() const { return routing(ranks); }
    // Of the source in a node that is not mapped and has this rank for its forwarder: side by side, from the place of
    // each put's first token on.
    constexpr u64 rows(u32 node) const { return own_rows() + (1 + node) * rows_bytes(); }
    constexpr u64 routing_send(u32 destination) const {
        return rows(nodes()) + destination * routing_bytes(max_tokens);
    }
    constexpr u64 rows_send(u32 node) const { return routing_send(ranks) + node * rows_bytes(); }
    constexpr u64 dispatch_bytes() const { return has_remote != 0 ? rows_send(nodes()) : rows(0); }

    // --- combine
    constexpr u64 header(u32 source) const { return source * sizeof(ResultHeader); }
    // A token's result of its k-th expert, if that one's rank is mapped: slot token * topk + k. The others' lie behind
    // max_results() of these, in the order of ranks, tokens and k, unless they come as sums. For a slot of a rank that
    // publishes: which row.
    constexpr u64 published_row(u64 slot) const { return header(ranks) + slot * sizeof(u32); }
    constexpr u64 slot(u64 slot) const {
        return align_up(published_row(max_results()), kPieceBytes) + slot * result_bytes;
    }
    constexpr u64 slots() const { return max_results() * (has_remote != 0 && weighted == 0 ? 2 : 1); }
    constexpr u64 rest(u64 slot) const { return this->slot(slots()) + slot * rest_bytes; }
    constexpr u64 sums_bytes() const { return weighted != 0 ? static_cast<u64>(max_tokens) * result_bytes : 0; }
    // Of the tokens that have results in a node, side by side.
    constexpr u64 sums(u32 node) const { return rest(slots()) + node * sums_bytes(); }
    constexpr u64 header_send(u32 destination) const { return sums(nodes()) + header(destination); }
    // One message's slots, and behind them their rests.
    constexpr u64 results_send(u32 destination) const {
        return header_send(ranks) + destination * max_results_of_rank() * (result_bytes + rest_bytes);
    }
    constexpr u64 rests_send(u32 destination) const {
        return results_send(destination) + max_results_of_rank() * result_bytes;
    }
    constexpr u64 sums_send(u32 node) const { return results_send(ranks) + node * sums_bytes(); }
    constexpr u64 combine_bytes() const { return has_remote != 0 ? sums_send(nodes()) : rest(slots()); }
};

}  // namespace deep_ep::wire
