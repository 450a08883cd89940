// The structs that a caller passes to initialization, with the layout of the golden file.
#pragma once

#include <string>

#include "golden.h"

namespace nvshmem_double {

// For the version named in the environment.
Golden golden();

void make_unique_id(const Golden& layout, void* id);
// Neither checks version words nor writes them, and keeps only a pointer to the id: like NVSHMEM.
void set_arguments(const Golden& layout, void* arguments, int pe, int pes, const void* id);

struct Arguments {
    std::string id;
    int pe, pes;
};
// Throws Failure.
Arguments read_arguments(const Golden& layout, unsigned flags, const void* arguments);

}  // namespace nvshmem_double
