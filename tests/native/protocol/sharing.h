// Queue pairs that kernels of another library post to as well, between our requests. Our threads may give up; then the
// others post on, and wait for all that has been posted.
#pragma once

#include <cstdint>

#include "nic/options.h"

namespace protocol::sharing {

// `batch`: requests after which the others ring.
void run(uint64_t seed, deep_ep::u32 batch, bool gives_up, const deep_ep::nic::Options& options);

// Our thread finds one of the others' behind its blocks each time, and so has no need to ring at once.
void run_left(uint64_t seed, const deep_ep::nic::Options& options);

}  // namespace protocol::sharing
