// What launches ask of the stand-in's memory.
#pragma once

#include <cstddef>

namespace driver_double {

// Of an allocation in host memory that begins there; 0: there is none.
size_t host_allocation_bytes(const void* address);

// Does what copies and fills have been queued there.
void finish_copies(const void* stream);
bool has_copies(const void* stream);

}  // namespace driver_double
