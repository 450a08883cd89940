// What the exported functions of the stand-in share.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "pe.h"

namespace nvshmem_double {

// Null before the first initialisation and after the last finalisation. Never destroyed otherwise: the NICs' thread
// runs until the process ends.
extern std::shared_ptr<Pe>& the_pe;
extern std::mutex& one_call_at_a_time;

// Carries out a call, or fails as the environment wants it to: -> a status. A failure is a line on stderr.
int carry_out(const std::string& call, const std::function<void()>& body);
// A call that needs an initialised device, and initialises it where that has been left for later.
int carry_out_on_device(const std::string& call, const std::function<void(Pe&)>& body);

}  // namespace nvshmem_double
