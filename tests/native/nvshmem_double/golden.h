// The layout of NVSHMEM's structs from a file of tests/support/data/nvshmem, not from the tables of wire/nvshmem.h,
// which are under test.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace nvshmem_double {

using Bytes = std::vector<uint8_t>;

class Golden {
  public:
    explicit Golden(const std::string& path) {
        std::ifstream file(path);
        if (!file) throw std::runtime_error(path + " cannot be read");
        // scripts/nvshmem_layouts.py writes a line for each name.
        for (std::string line; std::getline(file, line);) {
            char name[80];
            unsigned long long first = 0, second = 0;
            int major = 0, minor = 0, patch = 0;
            if (std::sscanf(line.c_str(), " \"version\": \"%d.%d.%d\"", &major, &minor, &patch) == 3) {
                version_ = {major, minor, patch};
            } else if (std::sscanf(line.c_str(), " \"%79[^\"]\": [%llu, %llu]", name, &first, &second) == 3 ||
                       std::sscanf(line.c_str(), " \"%79[^\"]\": %llu", name, &first) == 2) {
                numbers_[name] = {first, second};
            }
        }
        if (version_.size() != 3) throw std::runtime_error(path + " names no version");
    }

    int major() const { return version_[0]; }
    int minor() const { return version_[1]; }
    int patch() const { return version_[2]; }
    bool is_at_least(int minor) const { return version_[1] >= minor; }

    bool has(const std::string& name) const { return numbers_.count(name) != 0; }
    // The size of a table in bytes, or a constant itself.
    uint64_t number(const std::string& name) const { return entry(name).first; }
    uint64_t offset(const std::string& field) const { return entry(field).first; }

    // Writes a field of the table that begins at `begin`. A field that this version does not have is skipped.
    void put(Bytes& bytes, uint64_t begin, const std::string& field, uint64_t value) const {
        if (!has(field)) return;
        const auto [offset, size] = entry(field);
        if (begin + offset + size > bytes.size() || size > sizeof(value) || (size < 8 && value >> (8 * size) != 0)) {
            throw std::runtime_error(field + " cannot be " + std::to_string(value));
        }
        std::memcpy(bytes.data() + begin + offset, &value, size);
    }

  private:
    const std::pair<uint64_t, uint64_t>& entry(const std::string& name) const {
        const auto found = numbers_.find(name);
        if (found == numbers_.end()) throw std::runtime_error("no " + name + " in this version's golden file");
        return found->second;
    }

    std::vector<int> version_;
    std::map<std::string, std::pair<uint64_t, uint64_t>> numbers_;
};

}  // namespace nvshmem_double
