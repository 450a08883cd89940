// What both halves of low-latency mode ask of expert ids: which rank, which of several equal ones counts, which tokens
// of a unit.
#pragma once

#include "kernels/common/copy_once.h"
#include "kernels/common/divider.h"
#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"
#include "kernels/common/shape.h"
#include "wire/low_latency.h"

namespace deep_ep::low_latency {

// The parts of a kernel: launched together, or one by one (the last by the hook). What a rank forwards to others of
// its node, or sums for a rank of another, has a part of its own: it waits for other ranks, sending does not.
enum Phases : u32 { kSend = 1, kForward = 2, kReceive = 4 };

// The experts that a rank's tokens choose. `Ids`: from the place in [tokens][top-k] to the id, or to kNoExpert.
template <class Ids>
struct Choices {
    Ids ids;
    u32 topk;

    DEEP_EP_DEVICE u32 id(u32 token, u32 k) const { return ids(static_cast<u64>(token) * topk + k); }
    // The first of a token's choices that names the same expert. Its row, and its result, serve them all.
    DEEP_EP_DEVICE u32 first(u32 token, u32 k) const { return first_of(token, k, id(token, k)); }
    // The k-th choice's expert, counted from `begin`, if it is one of `count` and no choice before names it; else
    // kNoExpert. The expert that is returned is the one that was checked.
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
    // The first choice before the k-th that names an expert; none: k.
    DEEP_EP_DEVICE u32 first_of(u32 token, u32 k, u32 wanted) const {
        u32 first = 0;
        while (first < k && id(token, first) != wanted) ++first;
        return first;
    }
};

// The block: gives up if ranks are left out and rows are laid out to be forwarded, for which one of these may be
// needed: the call's graph was captured before (P17).
DEEP_EP_DEVICE bool lacks_forwarders(Operation& op, const wire::LowLatencyLayout& layout) {
    if (!layout.forwards_rows()) return false;
    for (u32 word = 0; word < wire::RankMask::used(op.ranks()); ++word) {
        const u64 bits = op.context().mask.words[word];
        if (bits == 0) continue;
        const auto rank = static_cast<i32>(wire::RankMask::lowest(word, bits));
        if (threadIdx.x == 0) op.fail(wire::kOutdated, Phase::kMask, rank, 0, 0);
        return true;
    }
    return false;
}

// As a routing carries them. They may change between two reads: if calls do not match, a rank's next message may come
// while the one before it is read (P15).
struct RoutedIds {
    const wire::RoutedId* ids;

    DEEP_EP_DEVICE u32 operator()(u64 choice) const { return device::read_once(ids[choice]); }
};
using Routed = Choices<RoutedIds>;

// A warp: which of a unit's tokens `has(token)` holds for, a bit each. All lanes get it.
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

// A unit's tokens are shared by as many warps as there are for each of so many units: into how many parts.
DEEP_EP_DEVICE u32 parts_of_unit(u32 warps, u32 units) {
    const u32 shares = warps / units;
    return shares == 0 ? 1 : (shares < wire::kUnitTokens ? shares : wire::kUnitTokens);
}

// The rows of a token that a warp sums, and their weights.
struct RowList {
    const u8** rows;  // [most]
    float* weights;   // [most]
    u32 most;
    u32 count;

    // A warp: adds its lanes' rows, in their order; null: a lane has none. There are no more than `most`, unless the
    // handle that they were found by has been written over.
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

// A warp: the sum over its lanes; all get it.
DEEP_EP_DEVICE u32 warp_total(u32 value) {
    for (u32 step = device::kWarpSize / 2; step != 0; step /= 2) {
        value += __shfl_xor_sync(device::kFullMask, value, static_cast<int>(step));
    }
    return value;
}

}  // namespace deep_ep::low_latency
