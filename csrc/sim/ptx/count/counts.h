// Counts of what kernels execute, and the time that it should take on a GPU, while counting is on.
//
// All counts follow from the instructions that threads execute and from their addresses. They describe PTX: ptxas may
// schedule differently, and usually does better.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/ptx/module.h"
#include "sim/ptx/time/nic_time.h"

namespace deep_ep::ptx {

// Counts for one instruction of a kernel, summed over all launches.
struct InstructionCount {
    u64 threads = 0;  // executions by a thread
    u64 warps = 0;    // executions by a warp, assuming that its threads converge wherever they can
    // Accesses to global memory: bytes that threads request, and 32-byte sectors that contain them, per execution by a
    // warp. Memory of peers is counted separately.
    u64 bytes = 0, sectors = 0;
    u64 peer_bytes = 0, peer_sectors = 0;
    // Accesses to shared memory: wavefronts (passes over the banks), and the fewest that would do.
    u64 wavefronts = 0, min_wavefronts = 0;
    // Loads from global memory: how often a thread had to wait for a batch of loads that begins with this one, and the
    // bytes of those batches.
    u64 trips = 0, trip_bytes = 0;
};

// One rank's launch, on the clock of the GPUs that are modeled.
struct LaunchTime {
    u32 rank;
    u32 blocks;
    double begin;
    Moment end;  // of its last thread
    Work work;
    u64 nic_bytes = 0;  // that the rank's NICs have sent meanwhile
};

struct KernelCount {
    u64 launches = 0;  // on one rank each
    u64 blocks = 0, warps = 0;
    // Rows are loads of at least 16 bytes. Their bytes, and how often warps have waited for them; a warp waits as often
    // as its thread that waits most.
    u64 row_bytes = 0, row_trips = 0;
    u64 max_block_barriers = 0;  // of any thread
    std::vector<InstructionCount> instructions;
    std::vector<LaunchTime> times;  // of launches, in the order in which they began
};

// How an instruction is shown.
struct InstructionText {
    u32 line;  // line of the PTX
    std::string opcode;
    std::string place;  // in the sources, with where it was inlined
    std::string file;   // path of the innermost source file
    u32 file_line;      // and the line there
    u32 place_number;   // index into Module::places
};

class Counts {
  public:
    // Null while counting is off.
    static std::shared_ptr<Counts> active();
    // Starts counting from zero, or stops. With times, worlds schedule their threads by time meanwhile, and deadlines
    // never pass.
    enum class What : u8 { kNothing, kExecutions, kTimes, kAll };
    // `one_gpu`: the ranks' blocks share a GPU. `nic`: bytes per second that the NICs of a rank send; 0: any number.
    static void count(What what, bool one_gpu, double nic);
    Counts(What what, bool one_gpu, double nic) : what_(what), memory_(one_gpu), nics_(memory_, nic) {}

    // Of instructions, at least the executions by threads are counted.
    bool executions() const { return what_ != What::kTimes; }
    bool times() const { return what_ != What::kExecutions; }

    // Declares memory that a rank owns. All other global memory belongs to the rank that accesses it.
    void add_heap(u64 base, u64 bytes, u32 rank) { heaps_[base] = {base + bytes, rank}; }
    bool is_peers(u64 address, u32 rank) const;

    struct Kernel {
        std::string target;
        std::vector<InstructionText> texts;
        std::vector<Cost> costs;
        KernelCount count;
    };
    // The counts of a kernel, by its symbol. If another module has that symbol too, the target is added to the name.
    Kernel& of(const Module& module, const Function& entry);
    const std::map<std::string, Kernel>& kernels() const { return kernels_; }

    // A launch begins once all earlier ones of its rank have ended, and all that had ended anywhere when it was made.
    double latest() const;
    void begin(Kernel& kernel, u64 launch, u32 rank, u32 blocks, double not_before);
    const Moment& begin_of(u64 launch) const { return launches_.at(launch).begin; }
    // A thread of the launch ends.
    void end(u64 launch, const Moment& moment, const Work& work);
    MemoryTime& memory() { return memory_; }
    NicTime& nics() { return nics_; }

  private:
    const What what_;
    struct Launch {
        Kernel* kernel;
        size_t number;  // among the kernel's
        Moment begin;
        u64 sent;  // by the rank's NICs before
    };
    struct Heap {
        u64 end;
        u32 rank;
    };
    std::map<u64, Heap> heaps_;
    std::map<std::string, Kernel> kernels_;
    MemoryTime memory_;
    NicTime nics_;
    std::map<u64, Launch> launches_;
    std::map<u32, double> ends_;  // of the launches of a rank
};

}  // namespace deep_ep::ptx
