#include "sim/host/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "sim/executor/executor.h"

namespace deep_ep::host {
namespace {

constexpr size_t kAlignment = 64;  // a cache line: no two allocations share one

}  // namespace

std::shared_ptr<void> CpuMemory::make_private(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0, bytes);
    return {memory, std::free};
}

std::shared_ptr<void> CpuMemory::make_polled(size_t bytes) {
    const std::shared_ptr<void> memory = make_shared(bytes);
    cpu::Executor::get().share_memory(memory.get(), bytes, -1);
    return {memory.get(), [memory](void* shared) { cpu::Executor::get().unshare_memory(shared); }};
}

void CpuMemory::write(void* target, const void* source, size_t bytes) { std::memcpy(target, source, bytes); }

void CpuMemory::fill(void* target, uint8_t byte, size_t bytes) { std::memset(target, byte, bytes); }

void CpuMemory::read(void* target, const void* source, size_t bytes) { std::memcpy(target, source, bytes); }

// Words of heaps: kernels of any rank, in any process, exchange, store, and load them at system scope (Operation).
// store_words uses an exchange, as kernels do for the abort word: an owner's last look is either ordered before it or
// finds it, whatever other hosts or kernels have stored in between. The word is in place on return.
uint64_t CpuMemory::load_word(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

void CpuMemory::store_words(const std::vector<uint64_t*>& words, uint64_t value) {
    for (uint64_t* word : words) __atomic_exchange_n(word, value, __ATOMIC_ACQ_REL);
}

// For communication between hosts, and from a host to its own kernels.
uint64_t CpuMemory::acquire_word(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

void CpuMemory::release_words(const std::vector<uint64_t*>& words, uint64_t value) {
    for (uint64_t* word : words) __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

void declare_near_part(Heap& heap) {
    cpu::Executor::get().share_memory(heap.base(), heap.bytes(), -1);
    heap.keep({heap.base(), [](void* base) { cpu::Executor::get().unshare_memory(base); }});
}

void declare_host_memory(Heap& heap) {
    cpu::Executor::get().map_host_memory(heap.base(), heap.bytes());
    heap.keep({heap.base(), [](void* base) { cpu::Executor::get().unmap_host_memory(base); }});
}

}  // namespace deep_ep::host
