// A machine with pages of 64 KiB, for a program that is linked with --wrap of these functions: the addresses of
// mappings are multiples of that, and so are the ranges that protection and advice apply to.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace {
constexpr size_t kPage = 64 << 10;
size_t up(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
bool aligned(void* address) { return reinterpret_cast<uintptr_t>(address) % kPage == 0; }
int refuse() {
    errno = EINVAL;
    return -1;
}
}  // namespace

extern "C" {
long __real_sysconf(int name);
void* __real_mmap(void* address, size_t bytes, int protection, int flags, int descriptor, off_t offset);
int __real_mprotect(void* address, size_t bytes, int protection);
int __real_madvise(void* address, size_t bytes, int advice);

long __wrap_sysconf(int name) { return name == _SC_PAGESIZE ? static_cast<long>(kPage) : __real_sysconf(name); }

void* __wrap_mmap(void* wanted, size_t bytes, int protection, int flags, int descriptor, off_t offset) {
    void* const room = __real_mmap(wanted, up(bytes) + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) return room;
    void* const address = reinterpret_cast<void*>(up(reinterpret_cast<uintptr_t>(room)));
    return __real_mmap(address, up(bytes), protection, flags | MAP_FIXED, descriptor, offset);
}

int __wrap_mprotect(void* address, size_t bytes, int protection) {
    return aligned(address) ? __real_mprotect(address, up(bytes), protection) : refuse();
}

int __wrap_madvise(void* address, size_t bytes, int advice) {
    return aligned(address) ? __real_madvise(address, up(bytes), advice) : refuse();
}
}
