// The structs that a caller hands to initialisation, by their layout in the golden file.
#pragma once

#include <string>

#include "golden.h"

namespace nvshmem_double {

// Of the version that the environment names.
Golden golden();

void make_unique_id(const Golden& layout, void* id);
// Neither looks at version words nor writes them, and keeps no more of the id than where it is: as NVSHMEM.
void set_arguments(const Golden& layout, void* arguments, int pe, int pes, const void* id);

struct Arguments {
    std::string id;
    int pe, pes;
};
// Throws Failure.
Arguments read_arguments(const Golden& layout, unsigned flags, const void* arguments);

}  // namespace nvshmem_double
