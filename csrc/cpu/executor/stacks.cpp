#include "cpu/executor/stacks.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "cpu/executor/sanitizers.h"

namespace deep_ep::cpu {

namespace {

constexpr int kMadvGuardInstall = 102;    // Linux 6.13: a guard page that costs no mapping of its own
constexpr size_t kMaxSplitGuards = 8192;  // mprotect splits a mapping in two; a process may have 65530 of them

size_t round_to_pages(size_t bytes) { return (bytes + 4095) & ~size_t{4095}; }

void install_guards(char* base, size_t count) {
    bool guard_without_split = true;
    const size_t step = count / kMaxSplitGuards + 1;
    for (size_t i = 0; i < count; i++) {
        char* guard = base + i * Stacks::kBytes;
        if (guard_without_split && madvise(guard, Stacks::kGuard, kMadvGuardInstall) == 0) continue;
        guard_without_split = false;
        if (i % step == 0) mprotect(guard, Stacks::kGuard, PROT_NONE);
    }
}

}  // namespace

Pages::Pages(size_t bytes) : size_(round_to_pages(bytes)) {
    if (size_ == 0) return;
    const long address =
        syscall(SYS_mmap, nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == -1) throw std::bad_alloc();
    data_ = reinterpret_cast<char*>(address);
}

Pages::~Pages() {
    if (data_) syscall(SYS_munmap, data_, size_);
}

void Stacks::reserve(size_t count) {
    if (count <= count_) return;
    Pages pages(count * kBytes);
    install_guards(pages.data(), count);
    forget();
    pages_ = std::move(pages);
    count_ = count;
}

void Stacks::forget() {
    if (pages_.data()) asan::unpoison(pages_.data(), pages_.size());
}

void raw_fill(void* destination, unsigned char value, size_t bytes) {
    if (!kTsan) {
        std::memset(destination, value, bytes);
        return;
    }
    for (auto *p = static_cast<unsigned char*>(destination), *end = p + bytes; p != end; p++) {
        *p = value;
        asm volatile("" ::: "memory");  // keeps the compiler from making a memset of this
    }
}

void raw_copy(void* destination, const void* source, size_t bytes) {
    if (!kTsan) {
        std::memcpy(destination, source, bytes);
        return;
    }
    auto* to = static_cast<unsigned char*>(destination);
    auto* from = static_cast<const unsigned char*>(source);
    for (size_t i = 0; i < bytes; i++) {
        to[i] = from[i];
        asm volatile("" ::: "memory");
    }
}

}  // namespace deep_ep::cpu
