// Memory that a rank's kernels work in beside the heap, and single words of heaps, wherever these lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace deep_ep::host {

class Memory {
  public:
    virtual ~Memory() = default;

    // For kernels alone. Zeroed.
    virtual std::shared_ptr<void> make_private(size_t bytes) = 0;
    // For kernels and the host at the same time, under one address. Zeroed.
    virtual std::shared_ptr<void> make_shared(size_t bytes) = 0;
    // The same, for words that both poll: kernels access it at system scope alone.
    virtual std::shared_ptr<void> make_polled(size_t bytes) { return make_shared(bytes); }
    // Both return when it is done; no kernel uses that memory meanwhile.
    virtual void write(void* target, const void* source, size_t bytes) = 0;
    virtual void fill(void* target, uint8_t byte, size_t bytes) = 0;
    // Returns when it is done. What is written meanwhile may be read in parts.
    virtual void read(void* target, const void* source, size_t bytes) = 0;
    // One word, of a heap or of what kernels work in, which kernels may use at the same time. It stands for itself.
    virtual uint64_t load_word(const uint64_t* word) = 0;
    // The same, and after it what was stored before the word was.
    virtual uint64_t acquire_word(const uint64_t* word) { return load_word(word); }
    // The same value into several such words; everywhere before anything that the caller does afterwards.
    virtual void store_words(const std::vector<uint64_t*>& words, uint64_t value) = 0;
    // The same, and before it all that this rank has stored: for acquire_word().
    virtual void release_words(const std::vector<uint64_t*>& words, uint64_t value) { store_words(words, value); }
};

}  // namespace deep_ep::host
