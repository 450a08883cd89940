// The time of a thread: when it issues its instructions, and when their results are there.
//
// A thread issues its instructions in order, each as soon as the registers that it names are ready. What it waits for
// in other threads comes with the moments of barriers and words. The longest path through all of that is the least time
// that the kernel takes on a GPU that has an SM for every block, and bandwidth for every access.
#pragma once

#include <array>
#include <deque>
#include <limits>
#include <vector>

#include "sim/ptx/module.h"
#include "sim/ptx/time/memory_time.h"

namespace deep_ep::ptx {

// An access to memory of the current instruction.
struct TimedAccess {
    enum class Kind : u8 { kLoad, kStore, kUpdate };
    u64 address, bytes;
    Kind kind;
    bool is_word;  // a strong access
    bool is_shared, is_peers;
};

class LaneTime {
  public:
    LaneTime(MemoryTime& memory, BlockTime& block, const Moment& begin) : memory_(memory), block_(block), now_(begin) {}

    double cycles() const { return now_.cycles; }
    const Work& work() const { return work_; }
    void execute(const Instruction& instruction, const Cost& cost, size_t registers);
    // The instruction's guard does not hold.
    void skip(const Instruction& instruction, size_t registers);
    void access(const Instruction& instruction, const Cost& cost, size_t registers, const TimedAccess& access);
    // A load from memory of the thread's own: parameters and local memory, by generic address.
    void load_own(const Instruction& instruction, size_t registers);
    void sleep(u64 ns) { advance(static_cast<double>(ns) * machine::kCyclesPerNs, place_); }

    // A bulk load. Returns when its bytes have arrived.
    Moment bulk_load(u64 address, u64 bytes, bool is_peers);
    void bulk_store(u64 address, u64 bytes, bool is_peers);
    void commit() {
        groups_.push_back(open_);
        open_ = {};
    }
    void wait_group(u64 pending, bool written);

    // The moment now, for others that will wait for it.
    const Moment& here();
    // A moment at which something that the current instruction has begun will have happened.
    Moment later(double cycles);
    // Waits for a moment.
    void join(const Moment& moment, double delay = 0);
    void count_barrier() { ++now_.barriers; }

  private:
    // A register whose value is not there yet.
    struct Pending {
        size_t slot;
        double ready;
        bool is_load;
    };
    struct Group {
        double read = 0, written = 0;
    };

    void move(u64 bytes, bool is_peers) { (is_peers ? work_.peer_bytes : work_.own_bytes) += bytes; }
    void write(size_t slot, double ready, bool is_load);
    // Waits for the registers that an instruction names.
    void wait_for(const Instruction& instruction, size_t registers);
    void advance(double cycles, u32 place) {
        now_.cycles += cycles;
        if (cycles > 0) own_.add(place, static_cast<float>(cycles));
    }
    void wait_until(double cycles) { advance(std::max(0.0, cycles - now_.cycles), place_); }
    void fence(FenceCost fence);
    void arrive(const Instruction& instruction, size_t registers, double cycles, bool is_load);
    // A load of a word. If the thread has waited for the store that it sees, the path leads there.
    void see(u64 word, double way);
    // Returns when the thread last looked at a word that it looks at now; later than all if it has not.
    double look(u64 word);

    MemoryTime& memory_;
    BlockTime& block_;
    Moment now_;
    Work work_;
    Shares own_;       // since now_.path
    u32 place_ = 0;    // of the current instruction
    double done_ = 0;  // all stores so far have been performed
    std::vector<Pending> pending_;
    // The words that it has looked at last, and when: those that it may be waiting for.
    static constexpr size_t kLooks = 8;
    std::array<std::pair<u64, double>, kLooks> looks_{};
    size_t oldest_look_ = 0;
    Group open_;
    std::deque<Group> groups_;
};

}  // namespace deep_ep::ptx
