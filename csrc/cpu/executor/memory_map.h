// Which memory is shared between ranks: the ranges in which an access narrower than system scope is a bug that no
// sanitizer can see, because on a CPU all scopes are the same instruction.
#pragma once

#include <cstddef>
#include <vector>

#include "wire/types.h"

namespace deep_ep::cpu {

class MemoryMap {
  public:
    void add(const void* begin, size_t bytes, int owner);
    void remove(const void* begin);
    // Whether threads of other ranks, or agents, take part in accesses that `rank` makes there.
    bool shared(const void* address, int rank) const;

  private:
    struct Range {
        u64 begin, end;
        int owner;  // -1: every rank's
    };
    std::vector<Range> ranges_;  // by begin
};

}  // namespace deep_ep::cpu
