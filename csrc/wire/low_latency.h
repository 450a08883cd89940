// Messages of low-latency mode, and the layout of its operations in their region (PROTOCOL P13). Both ends compute all
// offsets from what all ranks know: the Buffer and the sizes. No offset depends on the number of tokens of a call.
//
//   dispatch   routing of each source | this rank's rows, for ranks that are mapped to read | rows of sources in each
//              other node
//   combine    header of each source | rows that mapped sources publish | slots of mapped sources | of the others |
//              rests of all slots | sums from each other node
//
// Results that travel as LogFMT (device/logfmt.h) have their heads in the slots, and the rest in the rests.
//
// If some ranks are not mapped, messages to them are built after all of this, in the sender's own region, one area per
// destination.
//
// Rows go once to each node: to the sender's forwarder there, which is the rank with the sender's local index; the
// other ranks of the node read them in its region. A node is `per_node` ranks that are mapped to each other; 1: each
// rank is its own forwarder. If the source has also sent its top-k weights, the forwarder sums the node's results for
// it.
#pragma once

#include "wire/heap_layout.h"
#include "wire/types.h"

namespace deep_ep::wire {

// Tokens whose positions are found together: one word says which of them an expert has.
constexpr u32 kUnitTokens = 32;

// The most puts that carry a source's rows to a rank that is not mapped. Each uses the signal word of a chunk slot.
constexpr u32 kMaxRowPuts = 3;
static_assert(kMaxRowPuts <= kSlots && kMaxRowPuts <= kStreamWords, "a signal word for each");

// An expert id in a routing.
using RoutedId = u16;
constexpr RoutedId kNoExpert = 0xffff;
constexpr u32 kMaxRoutedExperts = kNoExpert;

// First part of a routing, which says where a source's tokens go. It is followed by u32 counts[experts of the
// receiver], the source's tokens for each, and RoutedId[tokens][top-k], which is the same for all receivers. For the
// source's forwarders, f32 weights[tokens][top-k] follow if there are weights.
struct RoutingHeader {
    u64 operation;
    u64 arguments;  // hash of what all ranks must agree on
    u32 tokens;     // tokens of the source
    // For ranks that are not mapped: where, among the results of all ranks, those begin that the receiver will send to
    // this source in combine.
    u32 first_result;
    u32 reserved[10];
};
static_assert(sizeof(RoutingHeader) == 64, "routing header");

// Precedes the results of one rank for another, in combine.
struct ResultHeader {
    u64 operation;
    u64 arguments;
    u64 published;  // offset of published results in the heap of the rank; kUnpublished: they are sent to slots
    u32 reserved[10];
};
constexpr u64 kUnpublished = ~0ull;
static_assert(sizeof(ResultHeader) == 64, "result header");

// A slot for a result, and the rank at the other end. For a row received in dispatch: its source, and the slot there
// for its result. For a token's choice of an expert: the rank that computes the result, and the slot where it arrives.
constexpr u32 kSlotBits = 22;
constexpr u32 kMaxResults = (1u << (kSlotBits - 1)) - 1;  // per rank: tokens times top-k; each has two slots
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
    u32 max_tokens;  // per rank
    u32 topk;
    u32 experts_per_rank;
    u32 x_bytes;       // per row of dispatch
    u32 scales_bytes;  // per row; 0: rows have none
    u32 result_bytes;  // per row of combine, or of its head
    u32 rest_bytes;    // per rest of such a row; 0: results are not split
    u32 has_remote;    // some pair of ranks of this Buffer is not load/store-reachable
    u32 row_puts;      // 1 to kMaxRowPuts
    u32 per_node;      // ranks per node
    u32 weighted;      // routings have weights; results are summed in their node, and the sums are sent

    constexpr u32 nodes() const { return ranks / per_node; }
    constexpr u32 node_of(u32 rank) const { return rank / per_node; }
    constexpr u32 forwarder(u32 node, u32 rank) const { return node * per_node + rank % per_node; }
    constexpr u32 experts_per_node() const { return per_node * experts_per_rank; }
    constexpr bool forwards_rows() const { return per_node > 1; }
    constexpr bool sums_remotely() const { return weighted != 0 && has_remote != 0; }
    constexpr bool same_local_index(u32 rank, u32 other) const { return rank % per_node == other % per_node; }

    constexpr u64 max_results() const { return static_cast<u64>(max_tokens) * topk; }
    // The most results that one rank sends another.
    constexpr u64 max_results_of_rank() const {
        return static_cast<u64>(max_tokens) * (topk < experts_per_rank ? topk : experts_per_rank);
    }
    // Tokens whose rows travel in one put, in whole units. The last put may have fewer.
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
    // Rows of this rank, indexed by token. All ranks have read them when all have given `free`.
    constexpr u64 own_rows() const { return routing(ranks); }
    // Rows of the source in an unmapped node that has this rank as its forwarder: contiguous within each put, starting
    // at the index of the put's first token.
    constexpr u64 rows(u32 node) const { return own_rows() + (1 + node) * rows_bytes(); }
    constexpr u64 routing_send(u32 destination) const {
        return rows(nodes()) + destination * routing_bytes(max_tokens);
    }
    constexpr u64 rows_send(u32 node) const { return routing_send(ranks) + node * rows_bytes(); }
    constexpr u64 dispatch_bytes() const { return has_remote != 0 ? rows_send(nodes()) : rows(0); }

    // --- combine
    constexpr u64 header(u32 source) const { return source * sizeof(ResultHeader); }
    // The result of a token's k-th expert is in slot token * topk + k if the expert's rank is mapped. Results of other
    // ranks follow from slot max_results() on, in order of rank, token and k, unless they arrive as sums. For a slot of
    // a rank that publishes its rows: the index of the row.
    constexpr u64 published_row(u64 slot) const { return header(ranks) + slot * sizeof(u32); }
    constexpr u64 slot(u64 slot) const {
        return align_up(published_row(max_results()), kPieceBytes) + slot * result_bytes;
    }
    constexpr u64 slots() const { return max_results() * (has_remote != 0 && weighted == 0 ? 2 : 1); }
    constexpr u64 rest(u64 slot) const { return this->slot(slots()) + slot * rest_bytes; }
    constexpr u64 sums_bytes() const { return weighted != 0 ? static_cast<u64>(max_tokens) * result_bytes : 0; }
    // Sums of the tokens that have results in a node, contiguous.
    constexpr u64 sums(u32 node) const { return rest(slots()) + node * sums_bytes(); }
    constexpr u64 header_send(u32 destination) const { return sums(nodes()) + header(destination); }
    // The slots of one message, followed by their rests.
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
