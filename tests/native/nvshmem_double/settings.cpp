#include "settings.h"

#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace nvshmem_double {
namespace {

std::string text(const char* name, const std::string& otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : otherwise;
}

uint64_t number(const char* name, uint64_t otherwise, uint64_t least, uint64_t most) {
    const std::string given = text(name, std::to_string(otherwise));
    char* end = nullptr;
    uint64_t value = std::strtoull(given.c_str(), &end, 10);
    const std::string unit = end;
    const int shift = unit == "K" || unit == "k"   ? 10
                      : unit == "M" || unit == "m" ? 20
                      : unit == "G" || unit == "g" ? 30
                                                   : 0;
    value <<= shift;
    if (end == given.c_str() || (shift == 0 && !unit.empty()) || value < least || value > most) {
        throw Failure(kInvalidValue, std::string(name) + "=" + given + ": expected " + std::to_string(least) + " to " +
                                         std::to_string(most));
    }
    return value;
}
int small(const char* name, int otherwise, int least, int most) {
    return static_cast<int>(
        number(name, static_cast<uint64_t>(otherwise), static_cast<uint64_t>(least), static_cast<uint64_t>(most)));
}
bool flag(const char* name) { return small(name, 0, 0, 1) != 0; }
// As NVSHMEM reads its own variables: by the first letter.
bool is_on(const char* name, bool otherwise) {
    const char* value = std::getenv(name);
    return value == nullptr ? otherwise : std::strchr("0NnFf", *value) == nullptr || *value == '\0';
}

uint32_t power_of_two(uint64_t value) {
    uint32_t power = 1;
    while (power < value) power *= 2;
    return power;
}

void read_fault(deep_ep::nic::Options& nic) {
    const std::string fault = text("NVSHMEM_DOUBLE_FAULT", "");
    if (fault.empty()) return;
    unsigned long long after = 0;
    unsigned syndrome = 0;
    if (std::sscanf(fault.c_str(), "%d,%d,%llu,%u", &nic.fault_rank, &nic.fault_peer, &after, &syndrome) != 4) {
        throw Failure(kInvalidValue, "NVSHMEM_DOUBLE_FAULT=" + fault + ": expected PE,PEER,AFTER,SYNDROME");
    }
    nic.fault_after = after;
    nic.fault_syndrome = syndrome;
}

}  // namespace

Settings::Settings()
    : folder(text("NVSHMEM_DOUBLE_FOLDER", "")),
      seconds(small("NVSHMEM_DOUBLE_SECONDS", 60, 1, 86400)),
      heap_bytes(number("NVSHMEM_SYMMETRIC_SIZE", 64 << 20, 1 << 20, 1ull << 40)),
      pes_per_node(small("NVSHMEM_DOUBLE_PES_PER_NODE", 0, 0, 1 << 16)),
      p2p(!flag("NVSHMEM_DISABLE_P2P")),
      ibgda(flag("NVSHMEM_IB_ENABLE_IBGDA")),
      rcs(small("NVSHMEM_IBGDA_NUM_RC_PER_PE", 2, 0, 1024)),
      nics(small("NVSHMEM_DOUBLE_NICS", 1, 1, 15)),
      chunk_log2(small("NVSHMEM_DOUBLE_CHUNK_LOG2", 20, 16, 40)),
      cpu_doorbells(flag("NVSHMEM_DOUBLE_CPU_DOORBELLS")) {
    if (folder.empty()) throw Failure(kInvalidValue, "NVSHMEM_DOUBLE_FOLDER is not set: PEs cannot meet");
    nic.blocks = power_of_two(number("NVSHMEM_QP_DEPTH", 1024, 128, 32768));
    nic.mtu = static_cast<uint32_t>(small("NVSHMEM_DOUBLE_NIC_MTU", 4096, 16, 1 << 20));
    nic.max_delay = static_cast<uint32_t>(small("NVSHMEM_DOUBLE_NIC_MAX_DELAY", 0, 0, 1 << 20));
    nic.relaxed = flag("NVSHMEM_DOUBLE_NIC_RELAXED");
    nic.atomics_pass = flag("NVSHMEM_DOUBLE_PCI_ATOMICS") && is_on("NVSHMEM_IB_ENABLE_RELAXED_ORDERING", true);
    read_fault(nic);
}

void complain(const std::string& what) {
    const std::string line = "nvshmem double: " + what + "\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

std::string layout_file() {
    return text("NVSHMEM_DOUBLE_LAYOUTS", "") + "/" + text("NVSHMEM_DOUBLE_VERSION", "") + ".json";
}

int wanted_failure(const std::string& call) {
    const std::string wanted = text("NVSHMEM_DOUBLE_FAIL", "");
    const size_t at = wanted.find('=');
    return at != std::string::npos && wanted.substr(0, at) == call ? std::atoi(wanted.c_str() + at + 1) : 0;
}

bool strict() { return flag("NVSHMEM_DOUBLE_STRICT"); }

}  // namespace nvshmem_double
