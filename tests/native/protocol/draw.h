// Choices of a run that the schedule does not make, drawn from its seed.
#pragma once

#include "wire/types.h"

namespace protocol {

using namespace deep_ep;

// SplitMix64.
class Draw {
  public:
    explicit Draw(u64 seed) : state_(seed) {}
    u32 below(u32 bound) {
        state_ += 0x9e3779b97f4a7c15ull;
        u64 z = (state_ ^ state_ >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return static_cast<u32>((z ^ z >> 31) % bound);
    }

  private:
    u64 state_;
};

}  // namespace protocol
