#include "host/network/networks.h"

#include <algorithm>
#include <stdexcept>

#include "fabric/registry.h"

namespace deep_ep::host {
namespace {

struct Fabric {
    std::string name;
    MakeNetwork make;
};

// By route.
template <class... States>
std::vector<Fabric> listed(const fabric::Fabrics<States...>*) {
    return {{"peer", nullptr}, {States::kName, make_network<States>}...};
}
std::vector<Fabric> fabrics() { return listed(static_cast<const fabric::Registry*>(nullptr)); }

}  // namespace

fabric::Route route_named(const std::string& name) {
    const std::vector<Fabric> known = fabrics();
    for (size_t route = 0; route < known.size(); ++route) {
        if (known[route].name == name) return static_cast<fabric::Route>(route);
    }
    throw std::invalid_argument("route=\"" + name + "\": expected \"peer\" or the name of a fabric");
}

std::vector<std::string> fabrics_of(const std::vector<fabric::Route>& routes) {
    std::vector<std::string> names;
    const std::vector<Fabric> known = fabrics();
    for (size_t route = fabric::kMapped + 1; route < known.size(); ++route) {
        if (std::find(routes.begin(), routes.end(), route) != routes.end()) names.push_back(known[route].name);
    }
    return names;
}

Networks::Networks(NetworkPlace place, const std::vector<fabric::Route>& routes) {
    const std::vector<Fabric> known = fabrics();
    by_route_.resize(known.size());
    for (size_t route = fabric::kMapped + 1; route < known.size(); ++route) {
        place.reached.clear();
        for (const fabric::Route taken : routes) place.reached.push_back(taken == route);
        if (std::find(routes.begin(), routes.end(), route) == routes.end()) continue;
        if (known[route].make == nullptr) {
            throw std::invalid_argument("fabric \"" + known[route].name + "\": this build has no network for it");
        }
        by_route_[route] = known[route].make(place);
    }
}

void Networks::fill(fabric::Peers& peers) const {
    for (size_t route = 0; route < by_route_.size(); ++route) {
        peers.states[route] = by_route_[route] ? by_route_[route]->state() : nullptr;
    }
}

uint64_t Networks::max_put_bytes(uint32_t pieces) const {
    uint64_t most = UINT64_MAX;
    for (const auto& network : by_route_) {
        if (network) most = std::min(most, network->max_put_bytes(pieces));
    }
    return most;
}

int Networks::look_up_peers() {
    int missing = -1;
    for (const auto& network : by_route_) {
        if (network && missing < 0) missing = network->look_up_peers();
    }
    return missing;
}

bool Networks::idle() const {
    return std::all_of(by_route_.begin(), by_route_.end(),
                       [](const auto& network) { return !network || network->idle(); });
}

bool Networks::works() const {
    return std::all_of(by_route_.begin(), by_route_.end(),
                       [](const auto& network) { return !network || network->works(); });
}

std::string Networks::refusal() const {
    for (const auto& network : by_route_) {
        if (network && !network->refusal().empty()) return network->refusal();
    }
    return {};
}

std::string Networks::fault() const {
    for (const auto& network : by_route_) {
        if (network && !network->fault().empty()) return network->fault();
    }
    return {};
}

std::vector<nic::Counters> Networks::counters() const {
    std::vector<nic::Counters> by_peer;
    for (const auto& network : by_route_) {
        const std::vector<nic::Counters> counted = network ? network->counters() : std::vector<nic::Counters>();
        by_peer.resize(std::max(by_peer.size(), counted.size()));
        for (size_t peer = 0; peer < counted.size(); ++peer) by_peer[peer] += counted[peer];
    }
    return by_peer;
}

std::vector<nic::Message> Networks::trace() const {
    std::vector<nic::Message> messages;
    for (const auto& network : by_route_) {
        const std::vector<nic::Message> told = network ? network->trace() : std::vector<nic::Message>();
        messages.insert(messages.end(), told.begin(), told.end());
    }
    return messages;
}

}  // namespace deep_ep::host
