// The meeting point of a job's processes: a file that all of them map, with a slot for each PE.
#pragma once

#include <cstdint>
#include <string>

#include "settings.h"

namespace nvshmem_double {

class Meeting {
  public:
    Meeting(const std::string& folder, int pe, int pes, double seconds);
    ~Meeting();
    Meeting(const Meeting&) = delete;
    Meeting& operator=(const Meeting&) = delete;

    // Returns once all PEs have arrived, with everything they wrote before. Throws Failure on all PEs alike if one
    // arrives with another call or other arguments; or if one does not arrive in time, after which no PE can meet here
    // again.
    void meet(const std::string& call, uint64_t first = 0, uint64_t second = 0);

  private:
    struct Said;
    struct Slot;
    Slot* slot(int pe) const;
    [[noreturn]] void give_up(const std::string& call, const std::string& why);

    const int pe_, pes_;
    const double seconds_;
    size_t bytes_ = 0;
    void* memory_ = nullptr;
    uint64_t met_ = 0;
};

}  // namespace nvshmem_double
