#include "host/heap/heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace deep_ep::host {
namespace {

// Without seals, a peer that shrinks its memory could kill this process: accesses beyond the end raise SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void raise(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// `kept`: the descriptor that the heap holds for its peers.
std::shared_ptr<Heap> map_pages(size_t bytes, int flags, int descriptor, int kept) {
    // No reservation, since the arena is large and most of it is never touched.
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, descriptor, 0);
    if (base == MAP_FAILED) raise("mapping a heap");
    std::shared_ptr<void> mapping(base, [bytes](void* mapped) { munmap(mapped, bytes); });
    return std::make_shared<Heap>(static_cast<uint8_t*>(base), bytes, kept, std::move(mapping));
}

}  // namespace

std::shared_ptr<Heap> Heap::make_plain(size_t bytes) { return map_pages(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, -1); }

std::shared_ptr<Heap> Heap::make_shared(size_t bytes) {
    const int descriptor = memfd_create("deep_ep_heap", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor < 0) raise("memfd_create");
    if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0 || fcntl(descriptor, F_ADD_SEALS, kSeals) != 0) {
        const int error = errno;
        close(descriptor);
        errno = error;
        raise("sizing a heap");
    }
    return map_pages(bytes, MAP_SHARED, descriptor, descriptor);
}

std::shared_ptr<Heap> Heap::map(int descriptor, size_t bytes) {
    const int seals = fcntl(descriptor, F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals) {
        throw std::runtime_error("expected memory that is sealed against a change of its size");
    }
    struct stat found{};
    if (fstat(descriptor, &found) != 0) raise("asking for the size of a heap");
    if (static_cast<size_t>(found.st_size) != bytes) {
        throw std::runtime_error("expected memory of " + std::to_string(bytes) + " bytes, found " +
                                 std::to_string(found.st_size));
    }
    return map_pages(bytes, MAP_SHARED, descriptor, -1);
}

std::shared_ptr<uint8_t> Heap::map_again(size_t bytes) const {
    // With an old size of zero, mremap(2) adds a second mapping of shared pages and leaves the first one as it is.
    void* pages = mremap(base_, 0, bytes, MREMAP_MAYMOVE);
    if (pages == MAP_FAILED) raise("mapping the first pages of a heap again");
    return {static_cast<uint8_t*>(pages), [bytes](uint8_t* mapped) { munmap(mapped, bytes); }};
}

void Heap::close_descriptor() {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = -1;
}

}  // namespace deep_ep::host
