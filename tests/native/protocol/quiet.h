// The end of an operation over a network: each thread of the block waits for a share of the queue pairs.
#pragma once

#include <cstdint>

#include "wire/types.h"

namespace protocol::quiet {

void run(uint64_t seed, deep_ep::u32 ranks, deep_ep::u32 per_peer, deep_ep::u32 warps);

}  // namespace protocol::quiet
