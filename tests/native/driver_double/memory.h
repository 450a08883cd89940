// The memory functions that launches need.
#pragma once

#include <cstddef>

namespace driver_double {

// Bytes of the allocation in host memory that begins there; 0: none.
size_t host_allocation_bytes(const void* address);

// Runs the copies and fills that are queued there.
void finish_copies(const void* stream);
bool has_copies(const void* stream);

}  // namespace driver_double
