// Limits on the size of one put on a queue pair.
#pragma once

#include <algorithm>

#include "wire/heap_layout.h"

namespace deep_ep::host {

// All requests of the put must fit into the ring together: for each piece, one for every `max_bytes`, two for every
// chunk, since chunks end at different places at the source and at the target, and three for the remainders; and the
// atomic.
inline u64 max_bytes_of_put(u32 blocks, u32 chunk_log2, u64 max_bytes, u32 pieces) {
    const u64 chunk = u64{1} << chunk_log2, others = 1 + 3 * u64{pieces};
    const u64 requests = blocks > others ? blocks - others : 0;
    const u64 most = std::min(max_bytes, chunk);
    return requests * (most * (chunk / wire::kPieceBytes) / (chunk + 2 * most)) * wire::kPieceBytes;
}

}  // namespace deep_ep::host
