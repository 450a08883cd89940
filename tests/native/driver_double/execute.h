// Execution of a launched kernel in the stand-in for the driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host/cuda/driver_types.h"

namespace driver_double {

// A PTX module, whose kernels are interpreted. Of an ELF file only the kernels' names are read; the code that runs is
// g++'s, from the same sources.
struct Program;
// Returns null for text that cannot be read, after printing the reason to standard error.
std::shared_ptr<const Program> load_ptx(const char* text);
bool has(const Program& program, const std::string& symbol);

struct Code {
    std::string symbol;
    std::shared_ptr<const Program> program;  // null for an ELF file
    const void* module;                      // must be loaded at launch
};

// Work that precedes a launch, by the numbers of ended().
struct Before {
    uint64_t in_stream = 0;         // the launch before it in its stream
    std::vector<uint64_t> awaited;  // those that its stream waits for
};
// Returns a number for ended(). Launches in one queue run one after the other. `args`: the kernel's arguments, or an
// array of them by rank if it is launched for several ranks at once. `stream`: index of the stream, from 0.
uint64_t run(const Code& code, const deep_ep::host::cuda::LaunchConfig& config, int queue, int stream, const void* args,
             const Before& before);
bool ended(uint64_t number);
// On a GPU kernels run by themselves.
void run_for_a_while();
// A kernel of the program that runs until it is told to end.
uint64_t run_users();
void end_users(uint64_t number);
// Bytes of the kernel's arguments; 0: unknown.
size_t argument_bytes(const std::string& symbol);
inline bool for_ranks(const std::string& symbol) { return symbol.find("of_each_rank") != std::string::npos; }
// Host memory that kernels also use: they must access it at system scope.
void share(const void* memory, size_t bytes);
void unshare(const void* memory);
// New memory of the driver. Ranks may share it, and earlier accesses to its addresses were to other memory.
void note_memory(const void* memory, size_t bytes);
void drop_memory(const void* memory);  // when it is released

}  // namespace driver_double
