// Memory that is shared between ranks: there an access with a scope narrower than system is a bug, which no sanitizer
// can see because on a CPU all scopes compile to the same instruction.
#pragma once

#include <cstddef>
#include <vector>

#include "wire/types.h"

namespace deep_ep::cpu {

class MemoryMap {
  public:
    void add(const void* begin, size_t bytes, int owner);
    void remove(const void* begin);
    // Whether an access by `rank` at this address may meet accesses by threads of other ranks or by agents.
    bool shared(const void* address, int rank) const;
    bool has(const void* address) const { return find(address) != nullptr; }

  private:
    struct Range {
        u64 begin, end;
        int owner;  // -1: shared by all ranks
    };
    const Range* find(const void* address) const;

    std::vector<Range> ranges_;  // by begin
};

}  // namespace deep_ep::cpu
