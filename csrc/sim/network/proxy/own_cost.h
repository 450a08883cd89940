// The cost of the proxy itself, without a network. In one process, one thread steps the proxy and the calling thread
// takes the place of a kernel. The rank sends to itself.
#pragma once

#include <vector>

#include "host/network/network.h"

namespace deep_ep::host::proxy {

// In nanoseconds, with one entry per put.
struct OwnCost {
    std::vector<double> command_to_post;     // from before the command is written until the transport gets the message
    std::vector<double> completion_to_word;  // from the transport's completion event until a kernel sees it retired
    std::vector<double> arrival_to_word;     // from the transport's arrival event until a kernel sees the signal
};

// Measured over the loopback. `place`: that of a single rank, with a heap for measured_layout().
OwnCost own_cost(const NetworkPlace& place, u32 puts);

// Commands per second, each of which is sent and received, over a transport that does both immediately.
double command_rate(const NetworkPlace& place, u32 count);

}  // namespace deep_ep::host::proxy
