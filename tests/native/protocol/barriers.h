// The entry of a block, and its barriers when some thread gives up: all threads leave each barrier with the same,
// correct answer (PROTOCOL P14).
#pragma once

#include <cstdint>

namespace protocol::barriers {

void run(uint64_t seed);

}  // namespace protocol::barriers
