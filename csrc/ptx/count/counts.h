// What kernels have executed, while it is counted.
//
// All of it follows from the instructions that threads have executed and from their addresses. None of it is a time,
// and it describes PTX: ptxas may schedule otherwise, and usually does better.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ptx/module.h"

namespace deep_ep::ptx {

// Of an instruction of a kernel, summed over all launches.
struct InstructionCount {
    u64 threads = 0;  // executions by a thread
    u64 warps = 0;    // executions by a warp whose threads come together wherever they can
    // Of accesses to global memory: bytes that threads have asked for, and sectors of 32 bytes that these lie in, for
    // each execution by a warp. Peers' memory is told apart.
    u64 bytes = 0, sectors = 0;
    u64 peer_bytes = 0, peer_sectors = 0;
    // Of accesses to shared memory: times that the banks are gone through, and how few it could be.
    u64 wavefronts = 0, min_wavefronts = 0;
    // Of loads from global memory: how often a thread has had to wait for some, the first of which was this one; and
    // the bytes that it then waited for.
    u64 trips = 0, trip_bytes = 0;
};

struct KernelCount {
    u64 launches = 0;  // of a rank
    u64 blocks = 0, warps = 0;
    // Rows: what is loaded by 16 bytes and more. How many such bytes a warp has loaded, and how often it has waited for
    // them: its thread that has most often.
    u64 row_bytes = 0, row_trips = 0;
    u64 max_block_barriers = 0;  // of a thread
    std::vector<InstructionCount> instructions;
};

// Of an instruction: what it is.
struct InstructionText {
    u32 line;  // of the PTX
    std::string opcode;
    std::string place;  // in the sources, with where it was inlined
    std::string file;   // its path, and the line there; where it was not inlined from
    u32 file_line;
};

class Counts {
  public:
    // Null while nothing is counted.
    static std::shared_ptr<Counts> active();
    // Begins anew, or ends.
    static void count(bool on);

    // Memory that a rank owns; all other global memory is the accessing rank's own.
    void add_heap(u64 base, u64 bytes, u32 rank) { heaps_[base] = {base + bytes, rank}; }
    bool is_peers(u64 address, u32 rank) const;

    struct Kernel {
        std::string target;
        std::vector<InstructionText> texts;
        KernelCount count;
    };
    // A kernel of a module, by its symbol; of another module that has one of that symbol too, with its target.
    Kernel& of(const Module& module, const Function& entry);
    const std::map<std::string, Kernel>& kernels() const { return kernels_; }

  private:
    struct Heap {
        u64 end;
        u32 rank;
    };
    std::map<u64, Heap> heaps_;
    std::map<std::string, Kernel> kernels_;
};

}  // namespace deep_ep::ptx
