// NVSHMEM's queue pairs and keys, as the fabric `ibgda` needs them: read from the state that NVSHMEM's host library
// keeps for kernels, and checked. Nothing is called and nothing is written: what lies in device memory comes through a
// reader.
//
// What is adopted holds as long as NVSHMEM is initialised. nvshmemx_qp_create moves the table of queue pairs, with
// NVSHMEM's counts in it: where there is that call, queue pairs are to be of one's own, whose counts lie elsewhere.
// Keys are copied, and those of memory that stays allocated do not change when the heap grows.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/network/queue_pairs.h"
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
    u32 version;                   // wire::nvshmem::version(...) of the host library that is loaded
    std::vector<u8> device_state;  // as the host library has filled it in
    std::vector<u8> ibgda_state;
    std::vector<u32> pes;       // by rank
    std::vector<bool> reached;  // by rank: whether there is to be a way to it. Empty: to all but this one
    u32 rank;
    u64 heap_offset;  // of this library's heap in NVSHMEM's, the same on every PE
    u64 heap_bytes;
    u32 queues;  // per peer
    // One for each queue, from nvshmemx_qp_create: used by no other library. Empty: NVSHMEM's own, shared with its
    // kernels.
    std::vector<i32> handles;
    // Where kernels count what they post to those: OwnCounts[queues, PEs] in device memory. NVSHMEM's own are in a
    // table that it moves. 0 without handles.
    u64 counts;
};

// Of a queue pair of one's own, in a cache line of its own.
struct alignas(64) OwnCounts {
    u64 reserved, filled, rung, completed;
    u32 ringing;
};

// Whether there is to be a way to a rank.
bool reaches(const Wanted& wanted, size_t rank);

// Throws Refused.
MadeQueuePairs adopt(const Wanted& wanted, const Read& read);
// The same but for what the heap needs, which need not be there yet.
void check(const Wanted& wanted, const Read& read);
// Adopts when a network is made.
MakeQueuePairs adopting(Wanted wanted);

// The queue pairs to each PE that NVSHMEM shares with its kernels.
struct SharedQueues {
    u32 nics;
    u32 per_nic;
};
SharedQueues shared_queues(u32 version, const std::vector<u8>& ibgda_state);
// Where this PE's symmetric heap begins; 0: NVSHMEM has filled in nothing.
u64 heap_of(const std::vector<u8>& device_state);

}  // namespace deep_ep::host::nvshmem
