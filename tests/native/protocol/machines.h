// Messages between hosts of ranks on several machines, over connections of this process. These have threads of their
// own, so a seed determines only what is sent, not when.
#pragma once

#include <cstdint>

namespace protocol::machines {

void run(uint64_t seed);

}  // namespace protocol::machines
