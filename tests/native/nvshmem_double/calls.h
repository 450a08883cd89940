// State shared by the exported functions: the PE of this process, and how a call is executed or fails.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "pe.h"

namespace nvshmem_double {

// Null before the first initialization and after the last finalization. May be called from any thread, also while
// another is in a call that waits for other PEs.
std::shared_ptr<Pe> the_pe();
// One call at a time. They throw Failure.
void initialise(unsigned flags, const void* arguments);
void finalise();

// Executes a call, or fails if the environment demands it. Returns a status. A failure prints a line to stderr.
int carry_out(const std::string& call, const std::function<void()>& body);
// For a call that needs an initialized device.
int carry_out_on_device(const std::string& call, const std::function<void(Pe&)>& body);
// For a collective call, which initializes the device if that was deferred.
int carry_out_collectively(const std::string& call, const std::function<void(Pe&)>& body);

}  // namespace nvshmem_double
