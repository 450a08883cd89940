// What hosts of ranks on several machines tell each other, over connections of this process: threads of their own, so a
// seed says only what is told, not when.
#pragma once

#include <cstdint>

namespace protocol::machines {

void run(uint64_t seed);

}  // namespace protocol::machines
