#include "shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "settings.h"

namespace nvshmem_double {
namespace {

// Reserves enough addresses to find aligned ones among them; the rest is released.
void* reserve(size_t bytes, size_t alignment) {
    const size_t all = bytes + alignment;
    void* const memory = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return memory;
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t aligned = (begin + alignment - 1) / alignment * alignment;
    const auto unmap = [](uintptr_t from, uintptr_t to) {
        const uintptr_t page = 4096, first = (from + page - 1) / page * page;
        if (first < to) munmap(reinterpret_cast<void*>(first), to - first);
    };
    unmap(begin, aligned);
    unmap(aligned + bytes, begin + all);
    return reinterpret_cast<void*>(aligned);
}

}  // namespace

void* map_shared(const std::string& path, size_t bytes, size_t alignment) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    void* memory = MAP_FAILED;
    // All processes request the same size, so it does not matter which is first.
    if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0)
        memory = reserve(bytes, alignment < 4096 ? 4096 : alignment);
    if (memory != MAP_FAILED) {
        memory = mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    }
    const int error = errno;
    if (file >= 0) close(file);
    if (memory == MAP_FAILED) throw Failure(kOutOfMemory, path + ": " + std::strerror(error));
    return memory;
}

void unmap_shared(void* memory, size_t bytes) { munmap(memory, bytes); }

}  // namespace nvshmem_double
