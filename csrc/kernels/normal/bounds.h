// A value that other ranks or the user may write is copied once, checked against its bounds, and only then used to load
// or store: between two reads it could change, and a wrong value must end in an exception, never in an access out of
// bounds (P15).
#pragma once

#include "kernels/common/copy_once.h"
#include "kernels/common/operation.h"
#include "kernels/normal/plan.h"

namespace deep_ep {

// Returns whether `rows` rows of `bytes` each, starting at `offset`, are within [begin, end). No product overflows,
// since rows have fewer than 2^32 bytes. An empty range fits anywhere.
constexpr bool rows_fit(u64 offset, u32 rows, u32 bytes, u64 begin, u64 end) {
    const u64 size = static_cast<u64>(rows) * bytes;
    return size == 0 || (begin <= offset && offset <= end && size <= end - offset);
}

// A range of one rank's rows among another rank's.
struct RowRange {
    u32 first;
    u32 rows;
};

// One thread: finds the rows that `from` sends to `to`, among those that `to` receives. If they are more than `most` or
// not a valid range, fails the operation and returns false.
DEEP_EP_DEVICE bool planned_rows(Operation& op, const Plan& plan, u32 from, u32 to, u32 most, RowRange& range) {
    const volatile i32* prefix = plan.rank_prefix;
    const i64 begin = from == 0 ? 0 : prefix[(from - 1) * op.ranks() + to], end = prefix[from * op.ranks() + to];
    range = {static_cast<u32>(begin), static_cast<u32>(end - begin)};
    if (begin >= 0 && end >= begin && end - begin <= most) return true;
    range = {0, 0};
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from == op.rank() ? to : from), most,
            static_cast<u64>(end - begin));
    return false;
}

// Index of a token's row among this rank's rows at rank `r`; negative if the token does not go there.
DEEP_EP_DEVICE i32 planned_row(const i32* token_row, u32 r) {
    return static_cast<i32>(device::read_once(static_cast<u32>(token_row[r])));
}

// A warp: returns the first of [low, high) for which `below` is false, or `high`. It is true for all before that one.
// Each step looks at as many as there are lanes, where a binary search would look at one.
template <class Below>
DEEP_EP_DEVICE u32 first_not_below(u32 low, u32 high, Below below) {
    while (low < high) {
        const u32 part = wire::ceil_div(high - low, device::kWarpSize + 1), at = low + (device::lane() + 1) * part - 1;
        const u32 mask = __ballot_sync(device::kFullMask, at < high && below(at)),
                  parts = static_cast<u32>(__popc(mask));
        low += parts * part;
        if (parts < device::kWarpSize) high = min(high, low + part - 1);
    }
    return low;
}

}  // namespace deep_ep
