#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "sim/vector/vector.h"

namespace deep_ep::cpu {

void pretouch(void* address, size_t bytes) {
    if (bytes == 0) return;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = reinterpret_cast<uintptr_t>(address) & ~(page - 1);
    const uintptr_t end = reinterpret_cast<uintptr_t>(address) + bytes;
#if defined(MADV_POPULATE_WRITE)
    const uintptr_t length = (end - begin + page - 1) & ~(page - 1);
    if (madvise(reinterpret_cast<void*>(begin), length, MADV_POPULATE_WRITE) == 0) return;
#endif
    // An atomic add of zero is a write that cannot lose a concurrent write of another thread.
    for (uintptr_t at = reinterpret_cast<uintptr_t>(address); at < end; at = (at & ~(page - 1)) + page) {
        __atomic_fetch_add(reinterpret_cast<u8*>(at), 0, __ATOMIC_RELAXED);
    }
}

}  // namespace deep_ep::cpu
