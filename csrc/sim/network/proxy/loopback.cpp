#include "sim/network/proxy/loopback.h"

#include <algorithm>
#include <map>

#include "sim/nic/place.h"

namespace deep_ep::host::proxy {
namespace {

// The inboxes in this process, by the heap of their rank.
template <class Inbox>
struct Directory {
    std::mutex mutex;
    std::map<const u8*, std::shared_ptr<Inbox>> inboxes;

    static Directory& get() {
        static Directory directory;
        return directory;
    }
};

}  // namespace

void Loopback::Inbox::add(u32 immediate) {
    const std::lock_guard<std::mutex> lock(mutex);
    immediates.push_back(immediate);
}

Loopback::Loopback(const NetworkPlace& place, Random random)
    : place_(place),
      random_(std::move(random)),
      inbox_(std::make_shared<Inbox>(place.generation)),
      links_(place.heaps.size()),
      met_(place.heaps.size()) {
    auto& directory = Directory<Inbox>::get();
    const std::lock_guard<std::mutex> lock(directory.mutex);
    directory.inboxes[place_.own_heap()] = inbox_;
}

Loopback::~Loopback() {
    auto& directory = Directory<Inbox>::get();
    const std::lock_guard<std::mutex> lock(directory.mutex);
    const auto found = directory.inboxes.find(place_.own_heap());
    if (found != directory.inboxes.end() && found->second == inbox_) directory.inboxes.erase(found);
}

// Returns null if the peer has left, or is not in this generation.
std::shared_ptr<Loopback::Inbox> Loopback::inbox_of(u32 peer) const {
    auto& directory = Directory<Inbox>::get();
    const std::lock_guard<std::mutex> lock(directory.mutex);
    const auto found = directory.inboxes.find(place_.heaps[peer]);
    const bool here = found != directory.inboxes.end() && found->second->generation == place_.generation;
    return here ? found->second : nullptr;
}

bool Loopback::fails(u32 peer) const {
    const nic::Options& nic = place_.nic;
    return nic.fault_rank == place_.rank && (nic.fault_peer < 0 || nic.fault_peer == static_cast<int>(peer)) &&
           links_[peer].posted >= nic.fault_after;
}

bool Loopback::takes(u32 peer) const {
    if (fails(peer) && place_.nic.fault_syndrome == 0) return false;
    return links_[peer].flying < place_.nic.in_flight;
}

bool Loopback::post(const Message& message) {
    if (!takes(message.peer)) return false;
    flights_.push_back({message});
    ++links_[message.peer].flying;
    ++links_[message.peer].posted;
    return true;
}

// Whether a step of the message is possible now.
bool Loopback::moves(const Flight& flight) const {
    const u32 peer = flight.message.peer;
    if (place_.closing(peer).closed() || fails(peer)) return !fails(peer) || place_.nic.fault_syndrome != 0;
    // A peer whose inbox existed and no longer does is recovering, perhaps without this network, or has left: nothing
    // waits for the message.
    met_[peer] = met_[peer] || inbox_of(peer) != nullptr;
    return met_[peer] || place_.has_left(peer);
}

bool Loopback::has_work() const {
    {
        const std::lock_guard<std::mutex> lock(inbox_->mutex);
        if (!inbox_->immediates.empty()) return true;
    }
    return std::any_of(flights_.begin(), flights_.end(), [this](const Flight& flight) { return moves(flight); });
}

// One step: a cut of the message, its immediate, or its completion.
void Loopback::step(Flight& flight, Events& events) {
    const Message& message = flight.message;
    if (place_.closing(message.peer).closed() || fails(message.peer)) {
        const bool closed = place_.closing(message.peer).closed();
        events.completions.push_back({message.context, closed ? 0 : place_.nic.fault_syndrome});
        flight.arrived = flight.completed = true;
        return;
    }
    if (flight.placed < message.bytes) {
        const u64 cut = std::min<u64>(place_.nic.mtu, message.bytes - flight.placed);
        u8* const target = place_.heaps[message.peer] + message.target + flight.placed;
        const u8* const source = place_.own_heap() + message.source + flight.placed;
        observe::read(accessor(), source, cut);
        observe::write(accessor(), target, cut);
        nic::place(target, source, cut);
        flight.placed += cut;
        place_.closing(message.peer).placed();
        return;
    }
    const bool repeated = random_(8) == 0;
    if (!flight.arrived && (flight.completed || random_(2) == 0)) {
        if (const auto inbox = inbox_of(message.peer)) {
            observe::tell_hosts(accessor());
            for (int times = repeated ? 2 : 1; times != 0; --times) inbox->add(message.immediate);
        }
        flight.arrived = true;
    } else if (!flight.completed) {
        events.completions.push_back({message.context});
        flight.completed = true;
    }
}

bool Loopback::poll(Events& events) {
    bool worked = false;
    {
        const std::lock_guard<std::mutex> lock(inbox_->mutex);
        while (!inbox_->immediates.empty()) {
            events.arrivals.push_back(inbox_->immediates.front());
            inbox_->immediates.pop_front();
            worked = true;
        }
        if (worked) observe::hear_hosts(accessor());
    }
    if (flights_.empty()) return worked;
    Flight& flight = flights_[random_(static_cast<u32>(flights_.size()))];
    if (!moves(flight)) return worked;
    step(flight, events);
    if (flight.arrived && flight.completed) {
        --links_[flight.message.peer].flying;
        flight = flights_.back();
        flights_.pop_back();
    }
    return true;
}

std::string Loopback::text(u32 error) const { return "error " + std::to_string(error) + ", as asked for"; }

}  // namespace deep_ep::host::proxy
