// Happens-before between all accesses to memory that kernels use, while it is watched, and the resulting races.
//
// Hosts, proxies and NICs report the accesses that go through observe/observer.h. Their other accesses are not noted:
// they never race, and they order nothing.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "sim/executor/random.h"
#include "sim/ptx/order/shadow.h"

namespace deep_ep::ptx {

class Order {
  public:
    // Null if nothing is watched. All kernels run on one host thread at a time. A thread of a kernel keeps the Order
    // that it began with: another may be installed before it ends.
    static std::shared_ptr<Order> watched();
    // Starts watching afresh, or stops. The seed decides which loads return old values; 0: none does.
    static void watch(bool on, u64 seed);

    explicit Order(u64 seed) : random_(seed), is_random_(seed != 0) {}

    // Held for the calls below, and from before an access until it is noted: NICs may have threads of their own.
    std::mutex mutex;

    // Declares memory that several ranks use; all other global memory belongs to one rank. Earlier accesses to it are
    // forgotten.
    void add_heap(u64 base, u64 bytes);
    void remove_heap(u64 base) { heaps_.erase(base); }

    // Begins a thread of a launch of `threads` threads. It is ordered after the clock of its rank's host and after all
    // launches of its rank that had ended when the first thread of the launch began, but not after other threads of its
    // launch.
    Actor begin(u32 rank, u64 launch, u64 threads, u64 block);
    void end(Actor& actor);

    // A host, a proxy or a queue pair, from its first access to its last. A host is ordered after ended launches.
    Actor& other(const observe::Accessor& accessor);
    void begin_other(const observe::Accessor& accessor);
    void end_other(const observe::Accessor& accessor);

    Clock told;  // released by hosts, for other hosts

    // The shadow for an access of a rank to global memory.
    Shadow& global(u64 address, u32 rank);

    // For loads of words; null: they return the newest value.
    cpu::Random* random() { return is_random_ ? &random_ : nullptr; }

  private:
    struct Launch {
        Clock begin, end;          // what its threads begin with; what its ended threads knew
        std::vector<u32> numbers;  // actor numbers for its threads
        std::vector<u32> used;     // actor numbers of its ended threads
        u64 threads;               // threads that have not ended
    };
    // For a rank: the clock of its ended launches, and the actor numbers of their threads, which may be reused.
    struct Ended {
        Clock clock;
        std::vector<u32> numbers;
    };

    using Key = std::tuple<observe::Kind, const void*, u32>;
    static Key key_of(const observe::Accessor& accessor) { return {accessor.kind, accessor.self, accessor.rank}; }

    std::map<u64, u64> heaps_;  // end by begin; heaps do not overlap
    Shadow in_heaps_;
    std::map<u32, Shadow> of_rank_;
    std::map<u32, Ended> ended_;
    std::map<u64, Launch> launches_;
    std::map<Key, Actor> others_;
    u32 actors_ = 0;
    cpu::Random random_;
    const bool is_random_;
};

}  // namespace deep_ep::ptx
