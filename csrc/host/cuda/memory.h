// A GPU's memory, and host memory that it has mapped.
#pragma once

#include <mutex>

#include "host/cuda/driver.h"
#include "host/heap/heap.h"
#include "host/heap/memory.h"

namespace deep_ep::host {

class CudaMemory final : public Memory {
  public:
    explicit CudaMemory(std::shared_ptr<const cuda::PrimaryContext> context);
    ~CudaMemory() override;
    CudaMemory(const CudaMemory&) = delete;
    CudaMemory& operator=(const CudaMemory&) = delete;

    std::shared_ptr<void> make_private(size_t bytes) override;
    std::shared_ptr<void> make_shared(size_t bytes) override;
    void write(void* target, const void* source, size_t bytes) override;
    void fill(void* target, uint8_t byte, size_t bytes) override;
    void read(void* target, const void* source, size_t bytes) override;
    uint64_t load_word(const uint64_t* word) override;
    void store_words(const std::vector<uint64_t*>& words, uint64_t value) override;

  private:
    void synchronize(const char* doing);

    const std::shared_ptr<const cuda::PrimaryContext> context_;
    cuda::Stream stream_ = nullptr;  // beside the kernels', which may be waiting for what is copied here
    std::mutex mutex_;               // of the word: a Buffer may be dropped by any thread
    std::shared_ptr<void> word_;     // where words are copied from and to
};

// A heap in the memory of the context's GPU, reached by all GPUs that can; its descriptor lets other processes map it.
// It may grow to `bytes`; the first of them are there at once, and zero as far as `cleared`. What lies beyond holds
// whatever was left in that memory. Only one that is `exported` has a descriptor.
std::shared_ptr<Heap> make_cuda_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, size_t bytes,
                                     size_t first, size_t cleared, bool exported);
// A peer's heap, made with the same numbers.
std::shared_ptr<Heap> map_cuda_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, int descriptor,
                                    size_t bytes, size_t first);
// Lets the context's GPU, and others, use a heap in the host's memory, own or a peer's, under its address as long as it
// lives. For ranks that reach each other through NICs, which are the host's threads: slow for kernels.
void pin_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, Heap& heap);

}  // namespace deep_ep::host
