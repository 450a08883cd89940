// Queue pairs created by another library, currently NVSHMEM (host/nvshmem/), to which this rank's kernels post
// (fabric/ibgda.h). Code that creates its own queue pairs fills in the same table.
#pragma once

#include <functional>
#include <vector>

#include "host/heap/memory.h"
#include "wire/types.h"

namespace deep_ep::host {

// The contents of one fabric::QueuePair. Addresses are those that kernels use.
struct MadeQueuePair {
    u64 ring;
    u64 record;
    u64 doorbell;
    u64 cqe;
    u64 returned;
    u32 returned_key;  // big endian
    u32 number;        // 0: there is none
    u32 blocks;
    u32 nic;                                         // the same index at this rank and at the peer
    u64 reserved, filled, rung, completed, ringing;  // addresses of the counters; the last is 32 bits wide
};

// Keys are big endian. `chunks` counts the chunks of memory that overlap this rank's heap; the first one begins
// `key_offset` bytes before the heap.
struct MadeQueuePairs {
    std::vector<MadeQueuePair> queue_pairs;  // [ranks, queues]; empty entries for ranks that are not reached
    u32 queues;
    u32 nics;
    u32 chunks;
    u32 chunk_log2;
    u64 key_offset;                // offset of the heap in its first chunk
    u64 max_bytes;                 // of a request
    u64 heap;                      // address for this rank's NICs, with `keys`
    std::vector<u64> heaps;        // [ranks], addresses for use with `remote_keys`
    std::vector<u32> keys;         // [chunks, nics]
    std::vector<u32> remote_keys;  // [ranks, chunks, nics]
};

// `reached`: per rank, whether it needs queue pairs. Throws std::runtime_error with a description of the problem.
using MakeQueuePairs = std::function<MadeQueuePairs(Memory& memory, const std::vector<bool>& reached)>;

}  // namespace deep_ep::host
