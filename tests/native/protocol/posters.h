// Many warps post to one small queue pair, or one small ring of the proxy: puts wait until there is room, publish in
// order, and leave the doorbell to each other. The receiver checks every byte.
#pragma once

#include <cstdint>

#include "host/network/nic_options.h"

namespace protocol::posters {

// `puts`: per warp.
void run(uint64_t seed, const char* fabric, deep_ep::u32 blocks, deep_ep::u32 warps, deep_ep::u32 puts,
         const deep_ep::nic::Options& options);

}  // namespace protocol::posters
