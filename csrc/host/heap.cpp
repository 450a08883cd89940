#include "host/heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace deep_ep::host {
namespace {

[[noreturn]] void raise(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

uint8_t* map_pages(size_t bytes, int flags, int descriptor) {
    // No reservation: the arena is large and mostly never touched.
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, descriptor, 0);
    if (base == MAP_FAILED) raise("mapping a heap");
    return static_cast<uint8_t*>(base);
}

}  // namespace

std::shared_ptr<Heap> Heap::make_plain(size_t bytes) {
    return std::shared_ptr<Heap>(new Heap(map_pages(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1), bytes, -1));
}

std::shared_ptr<Heap> Heap::make_shared(size_t bytes) {
    const int descriptor = memfd_create("deep_ep_heap", MFD_CLOEXEC);
    if (descriptor < 0) raise("memfd_create");
    if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
        const int error = errno;
        close(descriptor);
        errno = error;
        raise("sizing a heap");
    }
    return std::shared_ptr<Heap>(new Heap(map_pages(bytes, MAP_SHARED, descriptor), bytes, descriptor));
}

std::shared_ptr<Heap> Heap::map(int descriptor, size_t bytes) {
    return std::shared_ptr<Heap>(new Heap(map_pages(bytes, MAP_SHARED, descriptor), bytes, -1));
}

Heap::~Heap() {
    close_descriptor();
    munmap(base_, bytes_);
}

void Heap::close_descriptor() {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = -1;
}

}  // namespace deep_ep::host
