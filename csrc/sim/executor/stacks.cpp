#include "sim/executor/stacks.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#include "sim/executor/sanitizers.h"

namespace deep_ep::cpu {

namespace {

constexpr int kMadvGuardInstall = 102;    // Linux 6.13: a guard page that costs no mapping of its own
constexpr size_t kMaxSplitGuards = 8192;  // mprotect splits a mapping in two; a process may have 65530 of them

size_t page_bytes() {
    static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

size_t round_to_pages(size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

void install_guards(char* base, size_t count, size_t stride, size_t bytes) {
    bool guard_without_split = true;
    const size_t step = count / kMaxSplitGuards + 1;
    for (size_t i = 0; i < count; i++) {
        char* guard = base + i * stride;
        if (guard_without_split && madvise(guard, bytes, kMadvGuardInstall) == 0) continue;
        guard_without_split = false;
        if (i % step == 0) mprotect(guard, bytes, PROT_NONE);
    }
}

}  // namespace

Pages::Pages(size_t bytes) : size_(round_to_pages(bytes)) {
    if (size_ == 0) return;
    void* const address =
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(address);
}

Pages::~Pages() {
    if (data_) munmap(data_, size_);
}

size_t Stacks::guard() { return page_bytes(); }

size_t Stacks::stride() { return round_to_pages(guard() + kUsable); }

void Stacks::reserve(size_t count) {
    if (count <= count_) return;
    Pages pages(count * stride());
    install_guards(pages.data(), count, stride(), guard());
    forget();
    pages_ = std::move(pages);
    count_ = count;
}

void Stacks::forget() {
    if (pages_.data()) asan::unpoison(pages_.data(), pages_.size());
}

}  // namespace deep_ep::cpu
