// The sending side of a proxy alone, over a network controlled by the test: commands are put into a ring by hand.
#pragma once

#include <cstdint>

namespace protocol::sender {

void run(uint64_t seed);

}  // namespace protocol::sender
