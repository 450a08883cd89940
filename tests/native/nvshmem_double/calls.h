// What the exported functions share: the PE of this process, and how a call is carried out or fails.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "pe.h"

namespace nvshmem_double {

// Null before the first initialisation and after the last finalisation; from any thread, also while another is in a
// call that waits for other PEs.
std::shared_ptr<Pe> the_pe();
// One call at a time. Throw Failure.
void initialise(unsigned flags, const void* arguments);
void finalise();

// Carries out a call, or fails as the environment wants it to: -> a status. A failure is a line on stderr.
int carry_out(const std::string& call, const std::function<void()>& body);
// A call that needs an initialised device.
int carry_out_on_device(const std::string& call, const std::function<void(Pe&)>& body);
// A collective one that initialises it where that has been left for later.
int carry_out_collectively(const std::string& call, const std::function<void(Pe&)>& body);

}  // namespace nvshmem_double
