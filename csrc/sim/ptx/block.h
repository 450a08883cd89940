// What the threads of a block share: its shared memory, and the bulk copies into it that are in flight.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "sim/ptx/count/thread.h"
#include "sim/ptx/module.h"
#include "sim/ptx/order/barrier_clocks.h"
#include "sim/ptx/order/shadow.h"

namespace deep_ep::ptx {

// A copy from global to shared memory that has not been made yet.
struct BulkLoad {
    u64 target;  // offset in shared memory
    const u8* source;
    u64 bytes;
};

// An mbarrier. A phase ends once all arrivals have been made and all expected bytes have arrived. Bytes arrive as late
// as PTX allows: when a thread waits for the phase, or arrives for the next one.
struct Arrivals {
    u32 expected = 0;  // arrivals per phase
    u32 arrived = 0;
    u32 phase = 0;
    u32 tries = 0;  // unsuccessful waits for this phase
    u64 expected_bytes = 0, issued_bytes = 0;
    std::vector<BulkLoad> loads;
    // The clocks that a thread acquires when it sees the end of a phase: for the current phase, and for the last one
    // that has ended. `copies` is kept separately because the thread's own copies are ordered after those without a
    // fence.
    struct Known {
        Clock all;
        CopyClocks copies;
    };
    Known going_on, ended;
    // When the loads of these phases were issued, as counted by ThreadCount::add.
    u64 issued = 0, ended_issue = 0;
    Moment ends, ended_at;  // the moments at which they end
};

class Block {
  public:
    // The rank whose GPU a block runs on, its row in the grid, its launch and the number of threads of that launch, and
    // the block's number among all blocks so far.
    struct Place {
        u32 rank, row;
        u64 launch, threads, number;
    };

    // `kernel`: its counts, over all launches; null if nothing is counted.
    Block(u8* shared, u64 shared_bytes, u32 threads, const Place& place, std::shared_ptr<Counts> counts,
          Counts::Kernel* kernel)
        : threads(threads),
          place(place),
          shared_(shared),
          written_(shared_bytes),
          all_threads_(threads),
          counts_(std::move(counts)),
          kernel_(kernel) {
        if (counts_ && counts_->times()) time.emplace(counts_->memory().l2_of(place.rank));
    }

    u8* shared() { return shared_; }
    bool is_shared(const void* memory) const { return memory >= shared_ && memory < shared_ + written_.size(); }
    // For each byte of shared memory, whether it has been written.
    std::vector<u8>& written() { return written_; }
    // By offset in shared memory.
    std::map<u64, Arrivals>& barriers() { return barriers_; }

    u32 threads;  // threads that have not ended
    const Place place;

    // Accesses to its shared memory, and its barriers, while the order of accesses is watched.
    Shadow shadow;
    std::map<u64, BarrierClocks> barrier_clocks;
    // While times are predicted.
    std::optional<BlockTime> time;
    std::map<u64, BarrierMoments> barrier_moments;

    // Whether bulk copies into its shared memory exist that no thread has waited for.
    bool has_loads() const {
        return std::any_of(barriers_.begin(), barriers_.end(),
                           [](const auto& one) { return !one.second.loads.empty(); });
    }

    // Null if nothing is counted.
    std::unique_ptr<ThreadCount> count_of(u32 thread);
    bool is_peers(u64 address) const { return counts_->is_peers(address, place.rank); }

    // Aligned instructions must be executed by all threads of a warp together (PTX ISA, "Uniform Control Flow").
    // Returns whether a thread's `turn`-th aligned instruction is the same as that of the other threads of its warp.
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
    std::map<u32, std::vector<const Instruction*>> aligned_;  // by warp, in execution order
};

}  // namespace deep_ep::ptx
