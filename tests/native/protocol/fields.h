// Every field of a work request that a ConnectX would refuse, or go wrong with, one at a time: the software NIC names
// it.
#pragma once

#include <cstdint>

namespace protocol::fields {

void run(uint64_t seed);

}  // namespace protocol::fields
