// Messages with counts, which a dispatch exchanges first.
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
    for (u32 word = first; word < words; word += step) mask->words[word] = op.context().mask.words[word];
}

// One thread: returns the lowest rank that the source leaves out and this rank does not, or vice versa; kMaxRanks if
// there is none.
DEEP_EP_DEVICE u32 differing_rank(const Operation& op, const u8* theirs, bool& left_out_there) {
    const auto* words = reinterpret_cast<const volatile u64*>(theirs);
#pragma unroll 1
    for (u32 word = 0; word < wire::RankMask::used(op.ranks()); ++word) {
        const u64 there = words[word], differing = there ^ op.context().mask.words[word];
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

// One thread: returns one of a source's counts, read once. If it exceeds `most`, fails the operation and returns 0.
DEEP_EP_DEVICE i32 bounded_count(Operation& op, u32 from, const u8* counts, u32 index, u32 most) {
    const u32 count = reinterpret_cast<const volatile u32*>(counts)[index];
    if (count <= most) return static_cast<i32>(count);
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from), most, count);
    return 0;
}

}  // namespace deep_ep
