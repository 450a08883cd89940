// GPU memory, and host memory that the GPU has mapped.
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
    cuda::Stream stream_ = nullptr;  // not the one of kernels, which may be waiting for data copied here
    std::mutex mutex_;               // guards `word_`: any thread may drop a Buffer
    std::shared_ptr<void> word_;     // the source or target of copies of words
};

// Makes a heap in the memory of the context's GPU, accessible to all GPUs that are capable of it. Its descriptor lets
// other processes map it; only an `exported` heap has one. It may grow to `bytes`; the first `first` bytes exist at
// once, and the first `cleared` are zero. The others hold whatever was left in that memory.
std::shared_ptr<Heap> make_cuda_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, size_t bytes,
                                     size_t first, size_t cleared, bool exported);
// Maps a peer's heap, which was made with the same sizes.
std::shared_ptr<Heap> map_cuda_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, int descriptor,
                                    size_t bytes, size_t first);
// Lets the context's GPU and others access a heap in host memory, own or a peer's, at its address, as long as the heap
// lives. For ranks that reach each other through software NICs, which are host threads. Such memory is slow for
// kernels.
void pin_heap(const std::shared_ptr<const cuda::PrimaryContext>& context, Heap& heap);

}  // namespace deep_ep::host
