// On a CPU all memory is plain, and kernels and host share it.
#pragma once

#include "host/heap/heap.h"
#include "host/heap/memory.h"

namespace deep_ep::host {

class CpuMemory : public Memory {
  public:
    std::shared_ptr<void> make_private(size_t bytes) override;
    std::shared_ptr<void> make_shared(size_t bytes) override { return make_private(bytes); }
    // The executor checks the scope.
    std::shared_ptr<void> make_polled(size_t bytes) override;
    void write(void* target, const void* source, size_t bytes) override;
    void fill(void* target, uint8_t byte, size_t bytes) override;
    void read(void* target, const void* source, size_t bytes) override;
    uint64_t load_word(const uint64_t* word) override;
    uint64_t acquire_word(const uint64_t* word) override;
    void store_words(const std::vector<uint64_t*>& words, uint64_t value) override;
    void release_words(const std::vector<uint64_t*>& words, uint64_t value) override;
};

// Tells the executor what a heap's memory would be on GPUs, as long as the heap exists: words that other ranks' kernels
// and hosts access, or host memory.
void declare_near_part(Heap& heap);
void declare_host_memory(Heap& heap);

}  // namespace deep_ep::host
