// What the proxy itself costs, without a network: one thread that steps it, and this one in the place of a kernel, in
// one process. The rank sends to itself.
#pragma once

#include <vector>

#include "host/network/network.h"

namespace deep_ep::host::proxy {

// In nanoseconds, one of each for every put.
struct OwnCost {
    std::vector<double> command_to_post;     // from before the command is written until the transport is handed it
    std::vector<double> completion_to_word;  // from when the transport has told until a kernel sees it retired
    std::vector<double> arrival_to_word;     // from when the transport has told until a kernel sees the signal
};

// Over the loopback. `place`: of a rank alone, whose heap measured_layout() fits.
OwnCost own_cost(const NetworkPlace& place, u32 puts);

// Commands per second, of which each is sent and received, over a transport that does both at once.
double command_rate(const NetworkPlace& place, u32 count);

}  // namespace deep_ep::host::proxy
