// Queue pairs of a NIC that something else has made, for the kernels of this rank to post to (fabric/ibgda.h): today
// NVSHMEM (host/nvshmem/). What makes its own fills in the same table.
#pragma once

#include <functional>
#include <vector>

#include "host/heap/memory.h"
#include "wire/types.h"

namespace deep_ep::host {

// What fabric::QueuePair says of one; addresses are as kernels use them.
struct MadeQueuePair {
    u64 ring;
    u64 record;
    u64 doorbell;
    u64 cqe;
    u64 returned;
    u32 returned_key;  // big endian
    u32 number;        // 0: there is none
    u32 blocks;
    u32 nic;                                         // of this rank, and of the peer
    u64 reserved, filled, rung, completed, ringing;  // where these are counted; the last is 32 bits wide
};

// Keys are big endian. Chunks are those that this rank's heap has a part in, the first `key_offset` before it.
struct MadeQueuePairs {
    std::vector<MadeQueuePair> queue_pairs;  // [ranks, queues]; there are none to ranks that are not reached
    u32 queues;
    u32 nics;
    u32 chunks;
    u32 chunk_log2;
    u64 key_offset;                // where the heap begins in its first chunk
    u64 max_bytes;                 // of a request
    u64 heap;                      // for this rank's NICs with `keys`
    std::vector<u64> heaps;        // [ranks] with `remote_keys`
    std::vector<u32> keys;         // [chunks, nics]
    std::vector<u32> remote_keys;  // [ranks, chunks, nics]
};

// `reached`: per rank, whether there is to be a way to it. Throws std::runtime_error with what is wrong.
using MakeQueuePairs = std::function<MadeQueuePairs(Memory& memory, const std::vector<bool>& reached)>;

}  // namespace deep_ep::host
