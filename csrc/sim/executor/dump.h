// Lists where each thread waits, and for what: the text of a DeadlockError.
#pragma once

#include <string>

#include "sim/executor/scheduler.h"

namespace deep_ep::cpu {

std::string dump_fibers(const Scheduler& scheduler);

}  // namespace deep_ep::cpu
