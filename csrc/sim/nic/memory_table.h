// The memory that hosts have registered with NICs, by key. The table is the same on every rank, so that keys need not
// be exchanged.
#pragma once

#include <map>
#include <string>

#include "wire/mlx5.h"

namespace deep_ep::nic {

struct Registration {
    int rank;
    u64 address;  // the address that requests use
    u64 bytes;
    u8* memory;  // where this process has it mapped
};

class MemoryTable {
  public:
    void add(u32 key, const Registration& registration) { by_key_[key] = registration; }

    // Where [address, address + bytes) of `rank` is mapped here; null, with the reason in `wrong`, if the key does not
    // allow the access.
    u8* find(u32 key, int rank, u64 address, u64 bytes, const char* which, std::string& wrong) const {
        const auto found = by_key_.find(key);
        if (found == by_key_.end()) {
            wrong = std::string(which) + " key " + std::to_string(key) + " is not registered";
            return nullptr;
        }
        const Registration& memory = found->second;
        if (memory.rank != rank) {
            wrong = std::string(which) + " key " + std::to_string(key) + " belongs to rank " +
                    std::to_string(memory.rank) + ", expected rank " + std::to_string(rank);
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
