// A word that strong accesses have stored to: the values that loads of it may return, and the clocks that they acquire.
#pragma once

#include <vector>

#include "sim/executor/random.h"
#include "sim/ptx/order/actor.h"

namespace deep_ep::ptx {

// Coherence order is the order in which stores are executed. A load may return an older value than the newest, unless a
// newer store, or a load of one, happened before it (PTX ISA, "Coherence"). Only the last kMax values are kept.
class Word {
  public:
    Word(u64 address, u64 bytes) : address(address), bytes(bytes) {}

    // Returns the value that a load reads, whose order after other accesses is `knows`. `newest`: the current value,
    // which the load returns without `random`. A load that acquires joins what it acquires into `clock`.
    u64 load(u64 newest, bool acquires, const Made& access, const Clock& knows, Clock& clock, cpu::Random* random);
    // A release that a load of the value synchronizes with: that of the store itself, or that of an earlier store which
    // only read-modify-writes have followed.
    struct Released {
        Clock clock;
        Made by;
    };
    // The word changes from `before` to `after`. A read-modify-write (`updates`) also passes on what earlier stores
    // have released.
    struct Stored {
        u64 before, after;
        bool updates;
    };
    void store(const Stored& stored, const Made& access, const std::vector<Released>& releases);

    u64 address, bytes;

  private:
    static constexpr size_t kMax = 8;
    static constexpr u64 kStaleOneIn = 4;  // one load in four looks for an older value, so that polling loops end

    struct Entry {
        u64 value;
        Epoch written;
        std::vector<Released> releases;
        std::vector<Epoch> reads;
    };

    std::vector<Entry> entries_;  // the newest last
};

}  // namespace deep_ep::ptx
