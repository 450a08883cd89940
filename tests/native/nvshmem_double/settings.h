// The environment's settings for a run on the stand-in for NVSHMEM's host library, and how its calls fail.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "host/network/nic_options.h"

namespace nvshmem_double {

// NVSHMEM's status codes.
enum Status : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotSupported = 3,
    kSymmetry = 4,
    kInternal = 7
};

// A call that breaks a rule, or cannot be executed.
class Failure : public std::runtime_error {
  public:
    Failure(Status status, const std::string& why) : std::runtime_error(why), status_(status) {}
    Status status() const { return status_; }

  private:
    Status status_;
};

// Prints a line to stderr in a single write, so that lines of several processes do not mix.
void complain(const std::string& what);

// Read again by every first initialization.
struct Settings {
    std::string folder;
    double seconds;  // timeout of a collective call
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

// The file that tells how the release's structs are laid out.
std::string layout_file();
// The status in NVSHMEM_DOUBLE_FAIL; 0: that call must be executed.
int wanted_failure(const std::string& call);
// Whether version words of arguments are checked, which NVSHMEM does not do.
bool strict();

}  // namespace nvshmem_double
