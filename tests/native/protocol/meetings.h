// The entry of a block, and its meetings when some thread gives up: all threads leave each with the same answer, and
// with the right one (PROTOCOL P14).
#pragma once

#include <cstdint>

namespace protocol::meetings {

void run(uint64_t seed);

}  // namespace protocol::meetings
