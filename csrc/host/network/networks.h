// The networks of a Buffer, one for each fabric that its routes use.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fabric/peers.h"
#include "host/network/network.h"

namespace deep_ep::host {

// Returns the route for a name that callers use: "peer" or the name of a fabric. Throws std::invalid_argument.
fabric::Route route_named(const std::string& name);
// The names of the fabrics among routes.
std::vector<std::string> fabrics_of(const std::vector<fabric::Route>& routes);

class Networks {
  public:
    Networks() = default;
    // Fills in `place.reached` for each network.
    Networks(NetworkPlace place, const std::vector<fabric::Route>& routes);

    // Fills in the state that kernels post to.
    void fill(fabric::Peers& peers) const;
    uint64_t max_put_bytes(uint32_t pieces) const;
    int look_up_peers();
    bool idle() const;
    bool works() const;
    std::string refusal() const;
    std::string fault() const;
    std::vector<nic::Counters> counters() const;
    std::vector<nic::Message> trace() const;

  private:
    std::vector<std::unique_ptr<Network>> by_route_;  // null for routes that no rank has
};

// `memory`: allocates what the networks share with kernels. `routes`: by rank. `generation`: that of the operations to
// come.
using MakeNetworks =
    std::function<Networks(Memory& memory, const std::vector<fabric::Route>& routes, uint32_t generation)>;

}  // namespace deep_ep::host
