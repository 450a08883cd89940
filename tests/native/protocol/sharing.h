// Queue pairs that kernels of another library also post to, between our requests. Our threads may give up; then the
// others keep posting, and wait for everything that has been posted.
#pragma once

#include <cstdint>

#include "host/network/nic_options.h"

namespace protocol::sharing {

// `batch`: number of requests after which the others ring.
void run(uint64_t seed, deep_ep::u32 batch, bool gives_up, const deep_ep::nic::Options& options);

// Our thread finds another thread's WQEBBs after its own each time, and therefore need not ring at once.
void run_left(uint64_t seed, const deep_ep::nic::Options& options);

}  // namespace protocol::sharing
