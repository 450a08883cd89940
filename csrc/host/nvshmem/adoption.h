// NVSHMEM's queue pairs and keys, as the fabric `ibgda` needs them: read from the state that NVSHMEM's host library
// keeps for kernels, and checked. Nothing is called and nothing is written: what lies in device memory comes through a
// reader.
//
// What is adopted holds until NVSHMEM moves it. nvshmemx_qp_create allocates the table of queue pairs anew, with the
// counters in it, so all queue pairs are to be created first and the states to be copied after that; who cannot be sure
// of the first compares `Adopted::table` before each use. Keys are copied, and those of memory that stays allocated do
// not change when the heap grows.
#pragma once

#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "wire/nvshmem.h"

namespace deep_ep::host::nvshmem {

enum class Refusal {
    kVersion,       // of NVSHMEM: its tables are not known
    kState,         // too few bytes, or numbers that no NVSHMEM of this version writes
    kIbgda,         // NVSHMEM's kernels use another transport
    kRcs,           // there are only DCIs and DCTs
    kCpuDoorbells,  // a thread of the host rings them
    kRails,         // requests would go through other PEs
    kNics,          // several, with a version that mixes them up, or more than there may be
    kRanks,         // not PEs of this job
    kQueues,        // more wanted than there are
    kQueuePair,     // one that cannot be used
    kTable,         // queue pairs are not where this version is known to have them
    kHeap,          // not within NVSHMEM's
    kKeys,          // missing, too many, or ending too early
};

// Says what is wrong, and which setting to change.
class Refused : public std::runtime_error {
  public:
    Refused(Refusal refusal, const std::string& why) : std::runtime_error(why), why_(refusal) {}
    Refusal refusal() const { return why_; }

  private:
    Refusal why_;
};

// Copies device memory to the host.
using Read = std::function<void(u64 address, void* bytes, size_t count)>;

struct Wanted {
    u32 version;  // wire::nvshmem::version(...) of the host library that is loaded
    std::span<const u8> device_state;
    std::span<const u8> ibgda_state;
    std::vector<u32> pes;  // by rank
    u32 rank;
    u64 heap_offset;  // of this library's heap in NVSHMEM's, the same on every PE
    u64 heap_bytes;
    u32 queues;  // per peer
    // One for each queue, from nvshmemx_qp_create: used by nobody else. Empty: NVSHMEM's own, shared with its kernels.
    std::vector<i32> handles;
};

// Of fabric::QueuePair what NVSHMEM gives; addresses in device memory.
struct QueuePair {
    u64 ring;
    u64 record;
    u64 doorbell;
    u64 cqe;
    u64 returned;
    u32 returned_key;  // big endian
    u32 number;
    u32 blocks;
    u32 nic;                                         // of this PE, and of the peer
    u64 reserved, filled, rung, completed, ringing;  // where these are counted; the last is 32 bits wide
};

// Keys are big endian. Chunks are those that this library's heap has a part in, the first `key_offset` before it.
struct Adopted {
    std::vector<QueuePair> queue_pairs;  // [ranks, queues]; there are none to this rank itself
    u32 nics;
    u32 chunks;
    u32 chunk_log2;
    u64 key_offset;                // where this library's heap begins in its first chunk
    u64 most_bytes;                // of a request
    u64 heap;                      // for this rank's NICs with `keys`
    std::vector<u64> heaps;        // [ranks] with `remote_keys`
    std::vector<u32> keys;         // [chunks, nics]
    std::vector<u32> remote_keys;  // [ranks, chunks, nics]
    u64 table;                     // NVSHMEM's queue pairs; another address: all the above is void
};

// Throws Refused.
Adopted adopt(const Wanted& wanted, const Read& read);

}  // namespace deep_ep::host::nvshmem
