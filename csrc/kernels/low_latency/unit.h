// Queries on expert ids that both halves of low-latency mode make: the rank of an id, which of several equal ids
// counts, and which tokens of a unit are selected.
#pragma once

#include "kernels/common/copy_once.h"
#include "kernels/common/divider.h"
#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"
#include "kernels/common/shape.h"
#include "wire/low_latency.h"

namespace deep_ep::low_latency {

// The parts of a kernel, launched together or one by one (the last one by the hook). Forwarding rows to others of the
// node, or summing for a rank of another node, is a part of its own because it waits for other ranks, which sending
// does not.
enum Phases : u32 { kSend = 1, kForward = 2, kReceive = 4 };
constexpr bool kForwards = fabric::kRoutes != 0;  // only what has come through a network is forwarded

// The experts that a rank's tokens choose. `Ids` maps an index into [tokens][top-k] to the expert id, or to kNoExpert.
template <class Ids>
struct Choices {
    Ids ids;
    u32 topk;

    DEEP_EP_DEVICE u32 id(u32 token, u32 k) const { return ids(static_cast<u64>(token) * topk + k); }
    // The first of a token's choices that names the same expert. Its row and its result serve all of these choices.
    DEEP_EP_DEVICE u32 first(u32 token, u32 k) const { return first_of(token, k, id(token, k)); }
    // The k-th choice's expert, relative to `begin`, if it is one of `count` experts and no earlier choice names it;
    // otherwise kNoExpert. The returned expert is the value that was checked.
    DEEP_EP_DEVICE u32 chosen(u32 token, u32 k, u32 begin, u32 count) const {
        const u32 wanted = id(token, k);
        return wanted - begin < count && first_of(token, k, wanted) == k ? wanted - begin : wire::kNoExpert;
    }
    DEEP_EP_DEVICE bool chooses(u32 token, u32 k, u32 begin, u32 count) const {
        return chosen(token, k, begin, count) != wire::kNoExpert;
    }
    DEEP_EP_DEVICE bool chooses_any(u32 token, u32 begin, u32 count) const {
        bool any = false;
        for (u32 k = 0; k < topk; ++k) any = any || id(token, k) - begin < count;
        return any;
    }

  private:
    // The first choice before the k-th that names the expert; k if there is none.
    DEEP_EP_DEVICE u32 first_of(u32 token, u32 k, u32 wanted) const {
        u32 first = 0;
        while (first < k && id(token, first) != wanted) ++first;
        return first;
    }
};

// A token's choices, all of which are loaded before any is looked at: a search that loads one after another waits for
// each.
template <class Shape>
class TokenIds {
  public:
    template <class Ids>
    DEEP_EP_DEVICE TokenIds(const Choices<Ids>& choices, const Shape& shape, u32 token) : topk_(shape.topk()) {
#pragma unroll
        for (u32 k = 0; k < topk_; ++k) ids_[k] = choices.id(token, k);
    }
    // As Choices::chosen(). `k` is a constant where the shape is: it selects a register.
    DEEP_EP_DEVICE u32 chosen(u32 k, u32 begin, u32 count) const { return first_of(k, ids_[k], begin, count); }
    DEEP_EP_DEVICE bool chooses_any(u32 begin, u32 count) const {
        bool any = false;
#pragma unroll
        for (u32 k = 0; k < topk_; ++k) any = any || ids_[k] - begin < count;
        return any;
    }

  private:
    // Without a branch, since lanes of a warp have different choices. The loop's bound must be a constant for the ids
    // to be in registers.
    DEEP_EP_DEVICE u32 first_of(u32 k, u32 wanted, u32 begin, u32 count) const {
        bool counts = wanted - begin < count;
#pragma unroll
        for (u32 other = 0; other < Shape::kMostTopk; ++other) {
            if (other >= k) break;
            counts &= ids_[other] != wanted;
        }
        return counts ? wanted - begin : wire::kNoExpert;
    }

    const u32 topk_;
    u32 ids_[Shape::kMostTopk];
};

// The block: gives up if ranks are left out while the layout forwards rows, since one of these ranks may be needed as a
// forwarder: the call's graph was captured before they were left out (P17).
DEEP_EP_DEVICE bool lacks_forwarders(Operation& op, const wire::LowLatencyLayout& layout) {
    if (!kForwards || !layout.forwards_rows()) return false;
    for (u32 word = 0; word < wire::RankMask::used(op.ranks()); ++word) {
        const u64 bits = op.environment().mask.words[word];
        if (bits == 0) continue;
        const auto rank = static_cast<i32>(wire::RankMask::lowest(word, bits));
        if (threadIdx.x == 0) op.fail(wire::kOutdated, Phase::kMask, rank, 0, 0);
        return true;
    }
    return false;
}

// Ids in a routing message. They may change between two reads: if calls do not match, a rank's next message may arrive
// while the previous one is being read (P15).
struct RoutedIds {
    const wire::RoutedId* ids;

    DEEP_EP_DEVICE u32 operator()(u64 choice) const { return device::read_once(ids[choice]); }
};
using Routed = Choices<RoutedIds>;

// A warp: returns the tokens of a unit for which `has(token)` holds, one bit each, in all lanes.
template <class Has>
DEEP_EP_DEVICE u32 tokens_of_unit(u32 unit, u32 tokens, Has has) {
    u32 mask = 0;
    for (u32 base = 0; base < wire::kUnitTokens; base += device::kWarpSize) {
        const u32 token = unit * wire::kUnitTokens + base + device::lane();
        mask |= __ballot_sync(device::kFullMask, token < tokens && has(token)) << base;
    }
    return mask;
}
DEEP_EP_DEVICE u32 bits_below(u32 bit) { return (1u << bit) - 1; }

// Number of parts that a unit is divided into. The warps are distributed evenly over the units, and the warps of a unit
// share its tokens.
DEEP_EP_DEVICE u32 parts_of_unit(u32 warps, u32 units) {
    const u32 shares = warps / units;
    return shares == 0 ? 1 : (shares < wire::kUnitTokens ? shares : wire::kUnitTokens);
}

// The calling warp's number among those of all blocks. The last warp of each block comes first: the first one also
// tells others what its block has sent, and waits for what they send. If there is little work, each block gets some of
// it.
DEEP_EP_DEVICE u32 spread_warp() { return (device::warps() - 1 - device::warp()) * gridDim.x + blockIdx.x; }

// Number of warps that share a row, if there are more warps than rows. More than 32 would have less than a step each.
DEEP_EP_DEVICE u32 parts_of_rows(u32 warps, u32 rows) { return rows == 0 ? 1 : max(1u, min(32u, warps / rows)); }

// The bytes of a row that one of them takes.
struct PartOfRow {
    u32 begin, end;

    DEEP_EP_DEVICE PartOfRow(u32 row_bytes, u32 part, u32 parts) {
        const u32 pieces = row_bytes / static_cast<u32>(wire::kPieceBytes);
        begin = pieces * part / parts * static_cast<u32>(wire::kPieceBytes);
        end = pieces * (part + 1) / parts * static_cast<u32>(wire::kPieceBytes);
    }
    DEEP_EP_DEVICE u32 bytes() const { return end - begin; }
};

// The rows of a token that a warp sums, and their weights.
struct RowList {
    const u8** rows;  // [most]
    float* weights;   // [most]
    u32 most;
    u32 count;

    // A warp: appends its lanes' rows in lane order; null means that a lane has none. There are at most `most`, unless
    // the handle that they were found by has been overwritten.
    DEEP_EP_DEVICE void append(const u8* row, float weight) {
        const u32 mask = __ballot_sync(device::kFullMask, row != nullptr);
        const u32 place = count + static_cast<u32>(__popc(mask & bits_below(device::lane())));
        if (row != nullptr && place < most) {
            rows[place] = row;
            weights[place] = weight;
        }
        count = min(most, count + static_cast<u32>(__popc(mask)));
    }
};

}  // namespace deep_ep::low_latency
