// Messages with counts, which a dispatch exchanges first.
//
// Loops over ranks or experts run once or twice where a GPU is fast: unrolled, they would only be more code to fetch.
#pragma once

#include "kernels/normal/bounds.h"

namespace deep_ep {

// One thread: writes the header of a message that this rank sends.
DEEP_EP_DEVICE void store_counts_header(const Operation& op, u8* message, u32 tokens, u64 heap_bytes) {
    wire::NotifyHeader header{};
    header.operation = op.number();
    header.arguments = op.arguments();
    header.generation = op.generation();
    header.tokens = tokens;
    header.heap_bytes = heap_bytes;
    *reinterpret_cast<wire::NotifyHeader*>(message) = header;
}

// Threads `first`, `first + step`, ...: write the mask of the ranks that this one leaves out, after the header.
DEEP_EP_DEVICE void store_mask(const Operation& op, u8* message, u32 first, u32 step) {
    const u32 words = static_cast<u32>(sizeof(wire::RankMask) / sizeof(u64));
    auto* const mask = reinterpret_cast<wire::RankMask*>(message + sizeof(wire::NotifyHeader));
    for (u32 word = first; word < words; word += step) mask->words[word] = op.environment().mask.words[word];
}

// One thread: returns the lowest rank that the source leaves out and this rank does not, or vice versa; kMaxRanks if
// there is none.
DEEP_EP_DEVICE u32 differing_rank(const Operation& op, const u8* theirs, bool& left_out_there) {
    const auto* words = reinterpret_cast<const volatile u64*>(theirs);
#pragma unroll 1
    for (u32 word = 0; word < wire::RankMask::used(op.ranks()); ++word) {
        const u64 there = words[word], differing = there ^ op.environment().mask.words[word];
        if (differing == 0) continue;
        const u32 rank = wire::RankMask::lowest(word, differing);
        left_out_there = (there >> rank % wire::RankMask::kBits & 1) != 0;
        return rank;
    }
    return wire::kMaxRanks;
}

// One thread: rejects a message that does not belong to this operation, or whose sender leaves out different ranks than
// this one.
DEEP_EP_DEVICE bool check_counts(Operation& op, u32 source, const u8* message, wire::NotifyHeader& header) {
    header = copy_once<wire::NotifyHeader>(message);
    if (!op.check_message(Phase::kNotify, source, header.operation, header.arguments)) return false;
    bool there = false;
    const u32 other = differing_rank(op, message + sizeof(wire::NotifyHeader), there);
    const i32 from = static_cast<i32>(source);
    if (header.generation != op.generation()) {
        op.fail(wire::kMismatch, Phase::kHeader, from, op.generation(), header.generation);
    } else if (other != wire::kMaxRanks) {
        op.fail(wire::kMismatch, Phase::kMask, from, other, there);
    } else if (header.tokens > wire::kMaxTokens) {
        op.fail(wire::kMismatch, Phase::kBounds, from, wire::kMaxTokens, header.tokens);
    } else {
        return true;
    }
    return false;
}

// One of a message's counts, read once (P15).
DEEP_EP_DEVICE u32 count_at(const u8* counts, u32 index) {
    return reinterpret_cast<const volatile u32*>(counts)[index];
}

// One thread: calls visit(source, count) for every source, with the count at an index of its counts_of(source); 0 for
// those that are left out. Several are loaded before the first one is used.
template <class CountsOf, class Visit>
DEEP_EP_DEVICE void for_counts(const Operation& op, u32 ranks, u32 index, CountsOf counts_of, Visit visit) {
    constexpr u32 kBatch = 8;
#pragma unroll 1
    for (u32 first = 0; first < ranks; first += kBatch) {
        u32 counts[kBatch];
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const bool counts_it = first + i < ranks && op.present(first + i);
            counts[i] = counts_it ? count_at(counts_of(first + i), index) : 0;
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            if (first + i < ranks) visit(first + i, counts[i]);
        }
    }
}

// One thread: returns a source's count. If it exceeds `most`, fails the operation and returns 0.
DEEP_EP_DEVICE i32 bounded_count(Operation& op, u32 from, u32 count, u32 most) {
    if (count <= most) return static_cast<i32>(count);
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from), most, count);
    return 0;
}

// A warp: replaces `values` by their running sums. Returns the total.
DEEP_EP_DEVICE i32 sum_up(i32* values, u32 count) {
    i32 total = 0;
#pragma unroll 1
    for (u32 first = 0; first < count; first += device::kWarpSize) {
        const u32 i = first + device::lane();
        i32 sum = i < count ? values[i] : 0;
        for (u32 step = 1; step < device::kWarpSize; step *= 2) {
            const i32 below = __shfl_up_sync(device::kFullMask, sum, step);
            if (device::lane() >= step) sum += below;
        }
        if (i < count) values[i] = total + sum;
        total += __shfl_sync(device::kFullMask, sum, device::kWarpSize - 1);
    }
    return total;
}

// What a rank receives, as later kernels of the caller read it: in device memory, unlike what the host reads. Device
// pointers; null: not stored.
struct ReceivedCounts {
    i32* rank_sums;    // [width] running sums of the rows from each rank; with nodes, from all ranks of a local index
    i32* expert_sums;  // [experts] running sums of the rows of each local expert, rounded up to `alignment`
    i32* expert_rows;  // [experts] rows of each local expert
    i32* statistics;   // [experts] the same are added here
    u32 width;         // ranks, or ranks per node
    u32 alignment;
    u32 expanded;  // expert_sums: only the rows of the experts before are rounded up, not an expert's own
    u32 starts;    // find where each source's rows begin in the expanded layout

    DEEP_EP_DEVICE i32 aligned(i32 rows) const {
        return static_cast<i32>(wire::ceil_div(static_cast<u32>(rows), alignment) * alignment);
    }
    // One thread per expert.
    DEEP_EP_DEVICE void note(u32 expert, i32 rows) const {
        if (expert_rows != nullptr) expert_rows[expert] = rows;
    }
};

// A warp, after the barrier that follows all note() calls. `rows_from(i)` returns the rows that count for rank_sums[i].
// Each lane reads only elements that it has written itself; others read them after the operation has ended.
template <class RowsFrom>
DEEP_EP_DEVICE void store_received(const ReceivedCounts& counts, u32 experts, RowsFrom rows_from) {
    if (counts.expert_rows == nullptr) return;
#pragma unroll 1
    for (u32 e = device::lane(); e < experts; e += device::kWarpSize) {
        counts.expert_sums[e] = counts.aligned(counts.expert_rows[e]);
        if (counts.statistics != nullptr) counts.statistics[e] += counts.expert_rows[e];
    }
    for (u32 i = device::lane(); i < counts.width; i += device::kWarpSize) counts.rank_sums[i] = rows_from(i);
    sum_up(counts.expert_sums, experts);
    sum_up(counts.rank_sums, counts.width);
#pragma unroll 1
    for (u32 e = device::lane(); counts.expanded != 0 && e < experts; e += device::kWarpSize) {
        counts.expert_sums[e] -= counts.aligned(counts.expert_rows[e]) - counts.expert_rows[e];
    }
}

}  // namespace deep_ep
