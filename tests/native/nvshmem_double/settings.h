// What the environment says of a run on the stand-in for NVSHMEM's host library, and how its calls fail.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "nic/options.h"

namespace nvshmem_double {

// NVSHMEM's codes.
enum Status : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotSupported = 3,
    kSymmetry = 4,
    kInternal = 7
};

// A call that breaks a rule, or cannot be carried out.
class Failure : public std::runtime_error {
  public:
    Failure(Status status, const std::string& why) : std::runtime_error(why), status_(status) {}
    Status status() const { return status_; }

  private:
    Status status_;
};

// A line on stderr, as one write, so that those of several processes do not mix.
void complain(const std::string& what);

// Read anew by every first initialisation.
struct Settings {
    std::string folder;
    double seconds;  // that a collective call waits for the others
    uint64_t heap_bytes;
    int pes_per_node;  // 0: all
    bool p2p;
    bool ibgda;
    int rcs;
    int nics;
    int chunk_log2;
    bool cpu_doorbells;
    deep_ep::nic::Options nic;

    Settings();
};

std::string version();
// Of NVSHMEM_DOUBLE_FAIL; 0: that call is to be carried out.
int wanted_failure(const std::string& call);
// Version words of arguments are looked at: NVSHMEM does not do that.
bool strict();

}  // namespace nvshmem_double
