// Files that several processes map.
#pragma once

#include <cstddef>
#include <string>

namespace nvshmem_double {

// Makes the file, of zeros, where no other process has yet; an address that is a multiple of `alignment`. Throws
// Failure.
void* map_shared(const std::string& path, size_t bytes, size_t alignment);
void unmap_shared(void* memory, size_t bytes);

}  // namespace nvshmem_double
