// Division of small numbers by a divisor known only to the host: one multiplication instead of tens of cycles.
#pragma once

#include "wire/types.h"

namespace deep_ep {

// Computes n / divisor for n * divisor < 2^32. The error of the reciprocal, below divisor / 2^32, is then too small to
// reach the next quotient.
struct Divider {
    u64 reciprocal;  // ceil(2^32 / divisor)

    static constexpr Divider by(u32 divisor) { return {((1ull << 32) + divisor - 1) / divisor}; }
    constexpr u32 divide(u32 n) const { return static_cast<u32>(n * reciprocal >> 32); }
};
static_assert(Divider::by(1).divide(2047) == 2047 && Divider::by(3).divide(2047) == 682 &&
                  Divider::by(2048).divide(2047) == 0,
              "quotients");
static_assert(Divider::by(7).divide(6) == 0 && Divider::by(7).divide(7) == 1 && Divider::by(7).divide(13) == 1,
              "quotients");

}  // namespace deep_ep
