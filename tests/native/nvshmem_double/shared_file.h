// Files that several processes map.
#pragma once

#include <cstddef>
#include <string>

namespace nvshmem_double {

// Creates the file, filled with zeros, unless another process has, and maps it at a multiple of `alignment`. Throws
// Failure.
void* map_shared(const std::string& path, size_t bytes, size_t alignment);
void unmap_shared(void* memory, size_t bytes);

}  // namespace nvshmem_double
