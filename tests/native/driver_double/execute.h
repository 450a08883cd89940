// What the stand-in for the driver does with a launched kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "host/cuda/driver_types.h"

namespace driver_double {

// A module of PTX. Its kernels are interpreted. Of one that is an ELF file only the names are read, and what runs is
// what g++ has made of the same sources.
struct Program;
// Null, and why on the standard error, for a text that cannot be read.
std::shared_ptr<const Program> load_ptx(const char* text);
bool has(const Program& program, const std::string& symbol);

struct Code {
    std::string symbol;
    std::shared_ptr<const Program> program;  // null: of an ELF file
    const void* module;                      // which must be loaded when it is launched
};

// -> a number for ended(). Launches in one queue run one after the other. `args`: the kernel's; an array of them by
// rank where it is launched for several ranks at once. `stream`: its number, from 0 on.
uint64_t run(const Code& code, const deep_ep::host::cuda::LaunchConfig& config, int queue, int stream,
             const void* args);
bool ended(uint64_t serial);
// Of the kernel's arguments; 0: not known.
size_t argument_bytes(const std::string& symbol);
inline bool for_ranks(const std::string& symbol) { return symbol.find("of_each_rank") != std::string::npos; }
// Host memory that kernels use too: they keep to accesses at system scope there.
void share(const void* memory, size_t bytes);
void unshare(const void* memory);
// Memory of the driver's that is new: ranks may share it, and what was done there before was done to other memory.
void note_memory(const void* memory, size_t bytes);
void drop_memory(const void* memory);  // when it is given back

}  // namespace driver_double
