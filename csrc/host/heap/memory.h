// Memory that a rank's kernels use in addition to the heap, and access to single words of heaps, wherever they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace deep_ep::host {

class Memory {
  public:
    virtual ~Memory() = default;

    // For kernels only. Zeroed.
    virtual std::shared_ptr<void> make_private(size_t bytes) = 0;
    // For kernels and the host at the same time, at the same address. Zeroed.
    virtual std::shared_ptr<void> make_shared(size_t bytes) = 0;
    // The same, for words that both poll: kernels access it only at system scope.
    virtual std::shared_ptr<void> make_polled(size_t bytes) { return make_shared(bytes); }
    // Both are complete on return; no kernel uses that memory meanwhile.
    virtual void write(void* target, const void* source, size_t bytes) = 0;
    virtual void fill(void* target, uint8_t byte, size_t bytes) = 0;
    // Complete on return. Concurrent writes may be read partially.
    virtual void read(void* target, const void* source, size_t bytes) = 0;
    // Loads one word of a heap or of kernel memory, which kernels may access at the same time. Orders no other data.
    virtual uint64_t load_word(const uint64_t* word) = 0;
    // The same, and makes visible everything that was stored before the word.
    virtual uint64_t acquire_word(const uint64_t* word) { return load_word(word); }
    // Stores the same value to several such words. All stores are complete before the caller continues.
    virtual void store_words(const std::vector<uint64_t*>& words, uint64_t value) = 0;
    // The same, ordered after all earlier stores of this rank: pairs with acquire_word().
    virtual void release_words(const std::vector<uint64_t*>& words, uint64_t value) { store_words(words, value); }
};

}  // namespace deep_ep::host
