// The near part of a heap (P15): what kernels read-modify-write there while hosts store, and what other hosts tell.
#pragma once

#include <cstdint>

namespace protocol::near_part {

void run(uint64_t seed);

}  // namespace protocol::near_part
