// Carries puts to ranks that are not mapped: the host side of a fabric (fabric/registry.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/heap/memory.h"
#include "host/network/closing.h"
#include "host/network/nic_options.h"
#include "host/network/queue_pairs.h"
#include "wire/heap_layout.h"

namespace deep_ep::host {

// Interval at which a host that waits looks whether a peer's process has ended. Of a peer behind a network it says so
// after the second look.
constexpr uint64_t kPeerLook = 100'000'000;  // ns

class Network {
  public:
    virtual ~Network() = default;
    // The fabric's state in device memory, to which kernels post.
    virtual void* state() = 0;
    // Maximum size in bytes of one put with the given number of pieces.
    virtual uint64_t max_put_bytes(uint32_t) const { return UINT64_MAX; }
    // Looks up the endpoints of all ranks that it reaches. This precedes any send, since a provider may refuse messages
    // from an unknown sender. Returns a rank whose endpoint cannot be found yet, or -1 if all are known.
    virtual int look_up_peers() { return -1; }
    // Whether everything that kernels have posted, except what an operation itself waits for, has left.
    virtual bool idle() const { return true; }
    // Whether no request has failed: everything that kernels have posted has arrived, or still may.
    virtual bool works() const { return true; }
    // Describes what kernels have written that a NIC would refuse; empty if there is nothing.
    virtual std::string refusal() const { return {}; }
    // Describes the first put that has failed; empty if none has, or if its error code says enough.
    virtual std::string fault() const { return {}; }
    // counters() is by peer, trace() in the order of the requests; both are empty for a network that does not count.
    virtual std::vector<nic::Counters> counters() const { return {}; }
    virtual std::vector<nic::Message> trace() const { return {}; }
};

// The surroundings of a network.
struct NetworkPlace {
    int rank;
    std::vector<uint8_t*> heaps;  // of all ranks, at the addresses that the host code of this process uses
    wire::HeapLayout layout;
    uint32_t generation;              // of the operations that it serves
    std::vector<bool> reached;        // per rank: whether through this network
    Memory* memory;                   // allocates what it shares with kernels; outlives it
    bool kernels_on_cpu;              // kernels run on this process's executor
    bool in_process;                  // all ranks are threads of this process
    std::vector<u64*> masked;         // in each rank's heap, the ranks that it has masked; empty: no rank ever masks
    nic::Options nic;                 // of software NICs
    MakeQueuePairs make_queue_pairs;  // of NICs on the bus; null: software NICs
    std::string provider;             // of libfabric; empty: the best available
    std::string address;              // IP address at which other machines reach this one; empty: only one machine
    std::vector<int> cpus;            // on which a thread of the network may run; empty: any
    // Whether a rank has ended, possibly without announcing it; null: unknown.
    std::function<bool(u32 rank)> ended;

    uint8_t* own_heap() const { return heaps[static_cast<size_t>(rank)]; }
    // Whether a rank's host has announced that it stores nothing any more. Acquire: its earlier stores are then
    // visible.
    bool has_left(u32 peer) const {
        const auto* const header = reinterpret_cast<const wire::HeapHeader*>(heaps[peer]);
        return __atomic_load_n(&header->left, __ATOMIC_ACQUIRE) != 0;
    }
    // Whether it has left, or has ended without announcing it.
    bool is_gone(u32 peer) const { return has_left(peer) || (ended && ended(peer)); }
    nic::Closing closing(u32 peer) const {
        if (masked.empty()) return {};
        const u32 self = static_cast<u32>(rank), bits = wire::RankMask::kBits;
        return {masked[self] + peer / bits, masked[peer] + self / bits, self, peer};
    }
};

// Makes the network of the fabric with the given state; null if the build has none. The code of the fabric sets it when
// the library is loaded.
using MakeNetwork = std::unique_ptr<Network> (*)(const NetworkPlace& place);
template <class State>
inline MakeNetwork make_network = nullptr;

}  // namespace deep_ep::host
