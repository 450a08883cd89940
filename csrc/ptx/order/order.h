// The order of all kernels' accesses to memory, while it is watched: which happened before which, and which race.
//
// What hosts and NICs read and write is not noted: such an access races with none, and what it writes tells nothing.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "ptx/order/shadow.h"

namespace deep_ep::ptx {

class Order {
  public:
    // Null where it is not watched. All kernels run on one thread of the host at a time. A thread keeps the one that it
    // has begun in: another may be watched before it ends.
    static std::shared_ptr<Order> watched();
    // Begins anew, or ends.
    static void watch(bool on);

    // Memory that several ranks use; all other global memory is one rank's. What was there before is forgotten.
    void add_heap(u64 base, u64 bytes);

    // A thread of a launch, which has so many in all, begins behind all of its rank's that had ended when the launch's
    // first thread began: behind no other of its own launch.
    Actor begin(u32 rank, u64 launch, u64 threads, u64 block);
    void end(Actor& actor);

    // Where accesses of a rank to global memory are noted.
    Shadow& global(u64 address, u32 rank);

  private:
    struct Heap {
        u64 base, bytes;
    };
    std::vector<Heap> heaps_;
    Shadow in_heaps_;
    std::map<u32, Shadow> of_rank_;

    // Of a rank: what its threads that have ended had come after, and their numbers, which later launches' may have.
    struct Ended {
        Clock clock;
        std::vector<u32> numbers;
    };
    struct Launch {
        Clock begin;
        std::vector<u32> numbers;  // that its threads may have
        u64 threads;               // that have not ended
    };
    std::map<u32, Ended> ended_;
    std::map<u64, Launch> launches_;
    u32 actors_ = 0;
};

}  // namespace deep_ep::ptx
