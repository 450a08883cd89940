// A value that other ranks or the user may write is copied once, checked against its bounds, and only then used to load
// or store: read twice, it may have changed in between, and a wrong one must end in an exception, never in an access
// out of bounds (P15).
#pragma once

#include "kernels/common/copy_once.h"
#include "kernels/common/operation.h"
#include "kernels/normal/plan.h"

namespace deep_ep {

// Whether `rows` rows of `bytes` each, from `offset` on, lie within [begin, end). No product overflows: rows have less
// than 2^32 bytes. Of nothing it does not matter where it lies.
constexpr bool rows_fit(u64 offset, u32 rows, u32 bytes, u64 begin, u64 end) {
    const u64 size = static_cast<u64>(rows) * bytes;
    return size == 0 || (begin <= offset && offset <= end && size <= end - offset);
}

// Rows of one rank among those of another.
struct RowRange {
    u32 first;
    u32 rows;
};

// One thread: the rows that `from` sends to `to`, among those that `to` receives. False, and the operation fails: more
// than `most`, or none that can be.
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

// Where a token's row lies among this rank's at rank `r`; negative: it does not go there.
DEEP_EP_DEVICE i32 planned_row(const i32* token_row, u32 r) {
    return static_cast<i32>(device::read_once(static_cast<u32>(token_row[r])));
}

}  // namespace deep_ep
