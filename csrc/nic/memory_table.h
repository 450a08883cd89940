// Memory that NICs may access, by key: what a host registers. Every rank's table is the same, so that keys need not be
// exchanged.
#pragma once

#include <map>
#include <string>

#include "wire/mlx5.h"

namespace deep_ep::nic {

struct Registration {
    int rank;
    u64 address;  // as requests name it
    u64 bytes;
    u8* memory;  // where this process has it
};

class MemoryTable {
  public:
    void add(u32 key, const Registration& registration) { by_key_[key] = registration; }

    // Where [address, address + bytes) of `rank` lies here; null, and why in `wrong`, where the key does not allow it.
    u8* find(u32 key, int rank, u64 address, u64 bytes, const char* which, std::string& wrong) const {
        const auto found = by_key_.find(key);
        if (found == by_key_.end()) {
            wrong = std::string(which) + " key " + std::to_string(key) + " is not registered";
            return nullptr;
        }
        const Registration& memory = found->second;
        if (memory.rank != rank) {
            wrong = std::string(which) + " key " + std::to_string(key) + " is of rank " + std::to_string(memory.rank) +
                    ", expected one of rank " + std::to_string(rank);
            return nullptr;
        }
        if (address < memory.address || bytes > memory.bytes || address - memory.address > memory.bytes - bytes) {
            wrong = std::string(which) + " address: " + std::to_string(bytes) + " bytes at " +
                    std::to_string(static_cast<i64>(address - memory.address)) + " of a registration of " +
                    std::to_string(memory.bytes);
            return nullptr;
        }
        return memory.memory + (address - memory.address);
    }

  private:
    std::map<u32, Registration> by_key_;
};

}  // namespace deep_ep::nic
