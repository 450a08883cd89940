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

// Systems with vm.memfd_noexec=2 refuse files in memory that may be executed; before Linux 6.3 there were no others.
int make_file() {
    constexpr unsigned kNoExecution = 0x8, kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;  // MFD_NOEXEC_SEAL
    const int descriptor = memfd_create("deep_ep_heap", kFlags | kNoExecution);
    return descriptor >= 0 || errno != EINVAL ? descriptor : memfd_create("deep_ep_heap", kFlags);
}

[[noreturn]] void raise(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// Memory of the system's pages.
class PagesHeap final : public Heap {
  public:
    // `advice`: the one of madvise(2) by which pages are given back.
    PagesHeap(uint8_t* base, size_t bytes, int descriptor, std::shared_ptr<void> mapping, int advice)
        : Heap(base, bytes, descriptor, std::move(mapping)), advice_(advice) {}

    bool gives_back() const override { return true; }
    bool give_back(size_t offset, size_t bytes) override { return madvise(base() + offset, bytes, advice_) == 0; }

  private:
    const int advice_;
};

// `kept`: the descriptor that the heap holds for its peers.
std::shared_ptr<Heap> map_pages(size_t bytes, int flags, int descriptor, int kept, bool gives_back) {
    // No reservation, since the arena is large and most of it is never touched.
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, descriptor, 0);
    if (base == MAP_FAILED) raise("mapping a heap");
    std::shared_ptr<void> mapping(base, [bytes](void* mapped) { munmap(mapped, bytes); });
    auto* const first = static_cast<uint8_t*>(base);
    if (!gives_back) return std::make_shared<Heap>(first, bytes, kept, std::move(mapping));
    // The first frees pages of a file, here of shared memory, for all processes that have mapped them, and needs no
    // descriptor.
    const int advice = (flags & MAP_SHARED) != 0 ? MADV_REMOVE : MADV_DONTNEED;
    return std::make_shared<PagesHeap>(first, bytes, kept, std::move(mapping), advice);
}

}  // namespace

std::shared_ptr<Heap> Heap::make_plain(size_t bytes, bool gives_back) {
    return map_pages(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, -1, gives_back);
}

std::shared_ptr<Heap> Heap::make_shared(size_t bytes, bool gives_back) {
    const int descriptor = make_file();
    if (descriptor < 0) raise("making a file in memory (memfd_create)");
    if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0 || fcntl(descriptor, F_ADD_SEALS, kSeals) != 0) {
        const int error = errno;
        close(descriptor);
        errno = error;
        raise("sizing a heap");
    }
    return map_pages(bytes, MAP_SHARED, descriptor, descriptor, gives_back);
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
    return map_pages(bytes, MAP_SHARED, descriptor, -1, false);
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
