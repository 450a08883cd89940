// A transport over libfabric: TCP, EFA, any verbs NIC. The library is opened when it is first needed; where its headers
// were not there when this was built, there is no such transport, and the error says how to get it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "host/network/network.h"
#include "host/network/proxy/transport.h"

namespace deep_ep::host::proxy {

// `place.provider`: libfabric's name of one; empty: the best there is. Throws std::invalid_argument.
std::unique_ptr<Transport> make_libfabric(const NetworkPlace& place);

struct LibfabricProvider {
    std::string name;
    std::string version;  // as fi_info writes it
};
struct LibfabricHere {
    std::string version;                       // of the library; empty: it cannot be used,
    std::string refusal;                       // and this says why
    std::vector<LibfabricProvider> providers;  // that it offers here and that will do, best first
};
LibfabricHere libfabric_here();

// Why a transport by that provider cannot be made; empty: it can. `provider` and `address` as in NetworkPlace.
std::string libfabric_refusal(const std::string& provider, const std::string& address);

}  // namespace deep_ep::host::proxy
