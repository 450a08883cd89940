// What makes a schedule reproducible: the random numbers that it draws, and a hash of its decisions.
#pragma once

#include "wire/types.h"

namespace deep_ep::cpu {

// splitmix64 (public domain, Sebastiano Vigna): every seed gives a full-period stream.
class Random {
  public:
    // The initial state is a draw from the seed, not the seed itself: all generators advance along the same cycle in
    // the same steps, so seeds a few steps apart would give the same numbers, shifted.
    explicit Random(u64 seed = 0) : state_(seed) { state_ = next(); }
    u64 next() {
        u64 z = (state_ += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    // A number below n, with a bias that is negligible for a schedule.
    u64 below(u64 n) { return static_cast<u64>((static_cast<unsigned __int128>(next()) * n) >> 64); }
    bool one_in(u64 n) { return below(n) == 0; }

  private:
    u64 state_;
};

// A running hash over all decisions of a schedule: equal for equal runs.
class EventHash {
  public:
    void add(u64 value) { hash_ = (hash_ ^ value) * 0x9FB21C651E98DF25ull, hash_ ^= hash_ >> 32; }
    u64 value() const { return hash_; }

  private:
    u64 hash_ = 0xCBF29CE484222325ull;
};

}  // namespace deep_ep::cpu
