// The entry of a block, and its meetings when some thread gives up: all threads leave each meeting with the same,
// correct answer (PROTOCOL P14).
#pragma once

#include <cstdint>

namespace protocol::meetings {

void run(uint64_t seed);

}  // namespace protocol::meetings
