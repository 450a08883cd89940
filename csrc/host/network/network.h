// What carries puts to ranks that are not mapped: the host's side of a fabric (fabric/registry.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/heap/memory.h"
#include "host/network/queue_pairs.h"
#include "nic/closing.h"
#include "nic/options.h"
#include "wire/heap_layout.h"

namespace deep_ep::host {

class Network {
  public:
    virtual ~Network() = default;
    // What kernels post to: the fabric's state, in device memory.
    virtual void* state() = 0;
    // The most bytes that one put of so many pieces may have.
    virtual uint64_t max_put_bytes(uint32_t) const { return UINT64_MAX; }
    // Looks up the endpoints of all ranks that it reaches, before any rank sends: a provider may refuse what comes from
    // one that is not known. -> a rank whose endpoint is not to be found yet; -1: all are known.
    virtual int look_up_peers() { return -1; }
    // All that kernels have posted, and that is not an operation's to wait for, has left.
    virtual bool idle() const { return true; }
    // All that kernels have posted has arrived, or still may: no request has failed.
    virtual bool works() const { return true; }
    // What kernels have written that a NIC would refuse; empty where all is well.
    virtual std::string refusal() const { return {}; }
    // The first put that has failed, in words; empty: none has, or its code says enough.
    virtual std::string fault() const { return {}; }
    // By peer, and in the order of the requests; empty where nothing counts.
    virtual std::vector<nic::Counters> counters() const { return {}; }
    virtual std::vector<nic::Message> trace() const { return {}; }
};

// Where a network is.
struct NetworkPlace {
    int rank;
    std::vector<uint8_t*> heaps;  // every rank's, as the host of this process reaches it
    wire::HeapLayout layout;
    uint32_t generation;              // of the operations that it is for
    std::vector<bool> reached;        // per rank: through this network
    uint8_t* host_words;              // both banks of wire::HostWords, for networks that store them
    Memory* memory;                   // for what it shares with kernels; outlives it
    bool kernels_on_cpu;              // on this process's executor
    bool in_process;                  // all ranks are threads of this process
    std::vector<u64*> masked;         // in every rank's heap, the ranks that it has masked; empty: it never does
    nic::Options nic;                 // of software NICs
    MakeQueuePairs make_queue_pairs;  // of NICs on the bus; null: software NICs
    std::string provider;             // of libfabric; empty: the best there is
    std::string address;              // IP, at which other machines reach this one; empty: all ranks are on one
    std::vector<int> cpus;            // that a thread of the network may run on; empty: any
    // Whether a rank has ended, without a word perhaps; null: nothing here tells.
    std::function<bool(u32 rank)> ended;

    uint8_t* own_heap() const { return heaps[static_cast<size_t>(rank)]; }
    // Whether a rank's host has said that it stores nothing any more. Acquire: what it has stored is visible then.
    bool has_left(u32 peer) const {
        const auto* const header = reinterpret_cast<const wire::HeapHeader*>(heaps[peer]);
        return __atomic_load_n(&header->left, __ATOMIC_ACQUIRE) != 0;
    }
    // The same, or it has ended without a word.
    bool is_gone(u32 peer) const { return has_left(peer) || (ended && ended(peer)); }
    nic::Closing closing(u32 peer) const {
        if (masked.empty()) return {};
        const u32 self = static_cast<u32>(rank), bits = wire::RankMask::kBits;
        return {masked[self] + peer / bits, masked[peer] + self / bits, self, peer};
    }
};

// Makes the network of the fabric with that state; null in a build that has none. The fabric's folder sets it when the
// library is loaded.
using MakeNetwork = std::unique_ptr<Network> (*)(const NetworkPlace& place);
template <class State>
inline MakeNetwork make_network = nullptr;

}  // namespace deep_ep::host
