// A word that strong accesses have stored to: what loads of it may return, and what they learn.
#pragma once

#include <vector>

#include "cpu/executor/random.h"
#include "ptx/order/actor.h"

namespace deep_ep::ptx {

// Stores are in coherence order as they are executed. A load may return an older value than the newest, unless a newer
// store, or a load of it, happened before (PTX ISA, "Coherence"). What is older than kMax stores no load returns.
class Word {
  public:
    Word(u64 address, u64 bytes) : address(address), bytes(bytes) {}

    // `newest`: the value that it has. -> the value that an access reads, which has come after what `knows` says; what
    // it learns, if it acquires, goes into its clock. Without `random` it is the newest.
    u64 load(u64 newest, bool acquires, const Made& access, const Clock& knows, Clock& clock, cpu::Random* random);
    // It has had the value `before` and now has another, by an access that may release its clock. One that updates
    // leaves what earlier ones have released with the word.
    struct Stored {
        u64 before, after;
        bool releases, updates;
    };
    void store(const Stored& stored, const Made& access, const Clock& clock);

    u64 address, bytes;

  private:
    static constexpr size_t kMax = 8;
    static constexpr u64 kStaleOneIn = 4;  // loads that look for an older value: so loops that wait for one do end

    // A release that a load of the value reads from: the store's itself, or that of one before it that only
    // read-modify-writes have followed.
    struct Released {
        Clock clock;
        Made by;
    };
    struct Entry {
        u64 value;
        Epoch written;
        std::vector<Released> releases;
        std::vector<Epoch> reads;
    };

    std::vector<Entry> entries_;  // the newest last
};

}  // namespace deep_ep::ptx
