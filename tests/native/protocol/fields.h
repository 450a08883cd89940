// Every field of a work request that a ConnectX would refuse or misinterpret, one at a time: the software NIC must name
// it.
#pragma once

#include <cstdint>

namespace protocol::fields {

void run(uint64_t seed);

}  // namespace protocol::fields
