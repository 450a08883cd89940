// A transport over libfabric: TCP, EFA, any verbs NIC. The library is opened on first use. A build without libfabric's
// headers has no such transport; its error message says how to get it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "host/network/network.h"
#include "host/network/proxy/transport.h"

namespace deep_ep::host::proxy {

// `place.provider`: libfabric's name of a provider; empty: the best available. Throws std::invalid_argument.
std::unique_ptr<Transport> make_libfabric(const NetworkPlace& place);

struct LibfabricProvider {
    std::string name;
    std::string version;  // as fi_info writes it
};
struct LibfabricHere {
    std::string version;                       // of the library; empty: it cannot be used
    std::string refusal;                       // why it cannot be used
    std::vector<LibfabricProvider> providers;  // suitable ones that it offers here, best first
};
LibfabricHere libfabric_here();

// Why no transport over `provider` can be made; empty: it can. `provider` and `address` as in NetworkPlace.
std::string libfabric_refusal(const std::string& provider, const std::string& address);

}  // namespace deep_ep::host::proxy
