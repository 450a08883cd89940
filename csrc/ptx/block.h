// What the threads of a block share: its shared memory, and the bulk copies that are on their way into it.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ptx/count/thread.h"
#include "ptx/module.h"
#include "ptx/order/meeting.h"
#include "ptx/order/shadow.h"

namespace deep_ep::ptx {

// A copy from global to shared memory that is not made yet.
struct BulkLoad {
    u64 target;  // in shared memory
    const u8* source;
    u64 bytes;
};

// An mbarrier: a phase ends once all arrivals and all expected bytes have come. Its bytes come as late as they may:
// when a thread waits for the phase, or arrives for the next one.
struct Arrivals {
    u32 expected = 0;  // arrivals of a phase
    u32 arrived = 0;
    u32 phase = 0;
    u32 tries = 0;  // waits for this phase that have not seen its end
    u64 expected_bytes = 0, issued_bytes = 0;
    std::vector<BulkLoad> loads;
    // What a thread learns that sees the end of a phase: of the one that is going on, and of the last that has ended.
    // Of copies apart: what a thread's own copies come after too, without a fence.
    struct Known {
        Clock all, copies;
    };
    Known going_on, ended;
    // When the loads of these phases were issued, as the thread counts that waits for them.
    u64 issued = 0, ended_issue = 0;
};

class Block {
  public:
    // Where a block is: on which rank's GPU, in which row of the grid, in which launch, which has so many threads, and
    // which of all that there have been it is.
    struct Place {
        u32 rank, row;
        u64 launch, threads, number;
    };

    // `kernel`: what is counted of it, in all its launches; null: nothing is.
    Block(u8* shared, u64 shared_bytes, u32 threads, const Place& place, std::shared_ptr<Counts> counts,
          Counts::Kernel* kernel)
        : threads(threads),
          place(place),
          shared_(shared),
          written_(shared_bytes),
          all_threads_(threads),
          counts_(std::move(counts)),
          kernel_(kernel) {}

    u8* shared() { return shared_; }
    bool is_shared(const void* memory) const { return memory >= shared_ && memory < shared_ + written_.size(); }
    // By byte of shared memory: whether it has been.
    std::vector<u8>& written() { return written_; }
    // By their places in shared memory.
    std::map<u64, Arrivals>& barriers() { return barriers_; }

    u32 threads;  // that have not ended
    const Place place;

    // Of accesses to its shared memory, and at its barriers, while their order is watched.
    Shadow shadow;
    std::map<u64, Meeting> meetings;

    // Bulk copies into its shared memory that no thread has waited for.
    bool has_loads() const {
        return std::any_of(barriers_.begin(), barriers_.end(),
                           [](const auto& one) { return !one.second.loads.empty(); });
    }

    // Null where nothing is counted.
    std::unique_ptr<ThreadCount> count_of(u32 thread);
    bool is_peers(u64 address) const { return counts_->is_peers(address, place.rank); }

    // Aligned instructions, which all threads of a warp execute together (PTX ISA, "Uniform Control Flow"): whether the
    // `turn`-th of a thread of that warp is the one that the warp's other threads have come to.
    bool is_aligned(u32 warp, u64 turn, const Instruction& instruction) {
        std::vector<const Instruction*>& of_warp = aligned_[warp];
        if (turn == of_warp.size()) of_warp.push_back(&instruction);
        return of_warp[turn] == &instruction;
    }

  private:
    u8* const shared_;
    std::vector<u8> written_;
    std::map<u64, Arrivals> barriers_;
    const u32 all_threads_;
    const std::shared_ptr<Counts> counts_;
    Counts::Kernel* const kernel_;
    std::map<u32, WarpCount> warps_;
    std::map<u32, std::vector<const Instruction*>> aligned_;  // by warp, in the order in which it executes them
};

}  // namespace deep_ep::ptx
