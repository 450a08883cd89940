// The order of all accesses to memory that kernels use, while it is watched: which happened before which, and which
// race.
//
// Hosts, proxies and NICs report the accesses that go through observe/observer.h. Their other accesses are not noted:
// they race with nothing, and pass on no order.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "cpu/executor/random.h"
#include "ptx/order/shadow.h"

namespace deep_ep::ptx {

class Order {
  public:
    // Null where it is not watched. All kernels run on one thread of the host at a time. A thread keeps the one that it
    // has begun in: another may be watched before it ends.
    static std::shared_ptr<Order> watched();
    // Begins anew, or ends. From the seed is drawn which loads return old values; 0: none does.
    static void watch(bool on, u64 seed);

    explicit Order(u64 seed) : random_(seed), is_random_(seed != 0) {}

    // Held for what follows, and from before an access until it is noted: NICs may have threads of their own.
    std::mutex mutex;

    // Memory that several ranks use; all other global memory is one rank's. What was there before is forgotten.
    void add_heap(u64 base, u64 bytes);
    void remove_heap(u64 base) { heaps_.erase(base); }

    // A thread of a launch, which has so many in all, begins behind what its rank's host has learned and behind all of
    // its rank's launches that had ended when the launch's first thread began: behind no other of its own launch.
    Actor begin(u32 rank, u64 launch, u64 threads, u64 block);
    void end(Actor& actor);

    // A host or a queue pair, from its first access to its last. A host has seen which launches have ended.
    Actor& other(const observe::Accessor& accessor);
    void begin_other(const observe::Accessor& accessor);
    void end_other(const observe::Accessor& accessor);

    Clock told;  // by hosts, to each other

    // Where accesses of a rank to global memory are noted.
    Shadow& global(u64 address, u32 rank);

    // For words' loads; null: they return the newest value.
    cpu::Random* random() { return is_random_ ? &random_ : nullptr; }

  private:
    struct Launch {
        Clock begin, end;          // what its threads begin behind; what those that have ended had come after
        std::vector<u32> numbers;  // that its threads may have
        std::vector<u32> used;     // that those have had which have ended
        u64 threads;               // that have not ended
    };
    // Of a rank: what launches had come after that have ended, and their threads' numbers, which others may have.
    struct Ended {
        Clock clock;
        std::vector<u32> numbers;
    };

    using Key = std::tuple<observe::Kind, const void*, u32>;
    static Key key_of(const observe::Accessor& accessor) { return {accessor.kind, accessor.self, accessor.rank}; }

    std::map<u64, u64> heaps_;  // where each ends, by where it begins; none overlap
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
