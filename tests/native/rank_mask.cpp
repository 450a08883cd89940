// wire/rank_mask.h, at compile time.
#include "wire/rank_mask.h"

namespace {

using deep_ep::wire::kMaxRanks;
using deep_ep::wire::RankMask;

constexpr RankMask of(unsigned one, unsigned other) {
    RankMask mask{};
    mask.add(one);
    mask.add(other);
    return mask;
}

static_assert(of(0, 1023).has(0) && of(0, 1023).has(1023) && !of(0, 1023).has(63) && !of(0, 1023).has(64));
static_assert(of(63, 64).has(63) && of(63, 64).has(64) && !of(63, 64).has(0) && !of(63, 64).has(127));
static_assert(of(3, 70).first_difference(of(3, 70)) == kMaxRanks);
static_assert(of(3, 70).first_difference(of(3, 71)) == 70 && of(3, 71).first_difference(of(3, 70)) == 70);
static_assert(of(3, 70).first_difference(of(2, 70)) == 2);
static_assert(RankMask::used(1) == 1 && RankMask::used(64) == 1 && RankMask::used(65) == 2);
static_assert(RankMask::used(kMaxRanks) == sizeof(RankMask) / sizeof(deep_ep::u64));

}  // namespace
