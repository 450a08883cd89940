// The networks of a Buffer: those that its routes name.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fabric/peers.h"
#include "host/network/network.h"

namespace deep_ep::host {

// The route of a name that callers use: "peer", or a fabric's. Throws std::invalid_argument.
fabric::Route route_named(const std::string& name);
// Whether the words of ranks that are reached so are this rank's host's to store: wire/host_words.h.
bool host_stores_words(fabric::Route route);

class Networks {
  public:
    Networks() = default;
    // `place.reached` is filled in for each.
    Networks(NetworkPlace place, const std::vector<fabric::Route>& routes);

    // Tells kernels what to post to.
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

// `memory`: what it shares with kernels comes from there. `routes`: by rank. `generation`: of the operations that come.
// `host_words`: as in NetworkPlace.
using MakeNetworks = std::function<Networks(Memory& memory, const std::vector<fabric::Route>& routes,
                                            uint32_t generation, uint8_t* host_words)>;

}  // namespace deep_ep::host
