// NVSHMEM's queue pairs and keys in the form that the fabric `ibgda` needs: read from the state that NVSHMEM's host
// library keeps for kernels, and checked. Nothing is called and nothing is written: device memory is read by a reader
// function.
//
// Adopted queue pairs and keys are valid as long as NVSHMEM is initialized. nvshmemx_qp_create moves the table of queue
// pairs, including NVSHMEM's counts: in versions with that call, queue pairs must be dedicated ones, whose counts are
// elsewhere. Keys are copied, and those of memory that stays allocated do not change when the heap grows.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/network/queue_pairs.h"
#include "wire/nvshmem.h"

namespace deep_ep::host::nvshmem {

enum class Refusal {
    kVersion,       // the tables of this version of NVSHMEM are unknown
    kState,         // too few bytes, or numbers that no NVSHMEM of this version writes
    kIbgda,         // NVSHMEM's kernels use another transport
    kRcs,           // there are only DCIs and DCTs
    kCpuDoorbells,  // a host thread rings them
    kRails,         // requests would go through other PEs
    kNics,          // several, with a version that mixes them up, or too many
    kRanks,         // not PEs of this job
    kQueues,        // more requested than there are
    kQueuePair,     // one that cannot be used
    kTable,         // queue pairs are not where this version is known to have them
    kHeap,          // not within NVSHMEM's heap
    kKeys,          // missing, too many, or ending too early
};

// States what is wrong and which setting to change.
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
    std::vector<bool> reached;  // by rank: whether it needs queue pairs. Empty: all but this one
    u32 rank;
    u64 heap_offset;  // of this library's heap in NVSHMEM's, the same on every PE
    u64 heap_bytes;
    u32 queues;  // per peer
    // One per queue, from nvshmemx_qp_create: dedicated queue pairs, which no other library uses. Empty: NVSHMEM's own
    // queue pairs, shared with its kernels.
    std::vector<i32> handles;
    // The address of the counters for posts to dedicated queue pairs: OwnCounts[queues, PEs] in device memory.
    // NVSHMEM's own counters are in a table that it moves. 0 without handles.
    u64 counts;
};

// The counters of a dedicated queue pair, in their own cache line.
struct alignas(64) OwnCounts {
    u64 reserved, filled, rung, completed;
    u32 ringing;
};

// Whether a rank needs queue pairs.
bool reaches(const Wanted& wanted, size_t rank);

// Throws Refused.
MadeQueuePairs adopt(const Wanted& wanted, const Read& read);
// The same without the checks for the heap, which need not exist yet.
void check(const Wanted& wanted, const Read& read);
// Returns a function that adopts when a network is made.
MakeQueuePairs adopting(Wanted wanted);

// The number of queue pairs to each PE that are shared with NVSHMEM's kernels.
struct SharedQueues {
    u32 nics;
    u32 per_nic;
};
SharedQueues shared_queues(u32 version, const std::vector<u8>& ibgda_state);
// The address of this PE's symmetric heap; 0: NVSHMEM has filled in nothing.
u64 heap_of(const std::vector<u8>& device_state);

}  // namespace deep_ep::host::nvshmem
