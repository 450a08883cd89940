#include "host/network/proxy/progress.h"

#include <algorithm>
#include <stdexcept>

namespace deep_ep::host::proxy {
namespace {

constexpr u32 kRings = 4;            // so that not all blocks of a GPU reserve slots through one word
constexpr u32 kCommandsAtOnce = 16;  // taken from a ring before their messages are posted

u8* bank_of(const NetworkPlace& place) { return place.own_heap() + place.layout.bank_offset(place.generation); }

}  // namespace

Progress::Progress(const NetworkPlace& place, std::unique_ptr<Transport> transport, Clock clock)
    : place_(place),
      clock_(std::move(clock)),
      transport_(std::move(transport)),
      rings_(*place.memory, static_cast<u32>(place.rank), kRings, place.nic.blocks),
      sender_(static_cast<u32>(place.rank), static_cast<u32>(place.heaps.size()), place.generation,
              place.layout.scratch_of(static_cast<u32>(place.rank)), rings_, *transport_,
              [place](u32 peer) { return place.closing(peer).closed() || place.has_left(peer); }),
      receiver_(bank_of(place), place.layout, place.generation, static_cast<u32>(place.rank),
                [place](u32 source) { return place.reached[source] && !place.closing(source).closed(); }),
      fault_(std::static_pointer_cast<u64>(place.memory->make_polled(sizeof(u64)))),
      state_(std::static_pointer_cast<fabric::Proxy>(place.memory->make_private(sizeof(fabric::Proxy)))) {
    if (place.layout.bytes() > wire::proxy::kMaxHeapBytes) {
        throw std::invalid_argument("a heap of " + std::to_string(place.layout.bytes()) +
                                    " bytes: expected at most 1 TiB with the proxy");
    }
    const fabric::Proxy state{rings_.device_rings(), rings_.count(), rings_.commands(), fault_.get()};
    place.memory->write(state_.get(), &state, sizeof(state));
}

// The number of messages of a put is limited, and its pieces need not end at message boundaries.
u64 Progress::max_put_bytes(u32 pieces) const {
    const u64 messages = wire::proxy::kMaxMessages - pieces;
    return std::min(messages * transport_->max_bytes(), wire::proxy::kMaxCommandBytes);
}

bool Progress::step() {
    if (failed_) return false;
    try {
        return work();
    } catch (const std::exception& error) {
        failed_ = true;
        tell(static_cast<u32>(place_.rank), 0, "the proxy cannot continue: " + std::string(error.what()));
        return true;
    }
}

bool Progress::work() {
    const bool took = sender_.take(kCommandsAtOnce), posted = sender_.post();
    const bool polled = transport_->poll(events_);
    for (const Completion& completion : events_.completions) sender_.completed(completion);
    for (const u32 immediate : events_.arrivals) receiver_.arrived(immediate);
    events_.completions.clear();
    events_.arrivals.clear();
    receiver_.publish();
    for (const Sender::Fault& fault : sender_.faults()) faults_.push_back({fault, clock_.now_ns()});
    std::erase_if(faults_, [this](const Failed& failed) { return place_.has_left(failed.fault.peer); });
    while (!faults_.empty() && !told_later(faults_.front())) {
        const auto [peer, error] = faults_.front().fault;
        faults_.erase(faults_.begin());
        tell(peer, error,
             "the proxy cannot send to rank " + std::to_string(peer) + " over " + transport_->name() + ": " +
                 transport_->text(error));
    }
    rings_.publish();
    return took || posted || polled;
}

bool Progress::waits_for_gone_alone() const {
    return !rings_.has_next() && !sender_.is_open_to([this](u32 peer) { return !place_.is_gone(peer); });
}

bool Progress::has_work() const { return !failed_ && (sender_.has_work() || transport_->has_work()); }

// A link ends with its peer's process and is usually the first to show it. The watch on the process has a better
// explanation, so it gets time to announce the end to all ranks before this rank blames the link.
bool Progress::told_later(const Failed& failed) const { return clock_.now_ns() - failed.since_ns < clock_.patience_ns; }

// Stores the text before the word: the host asks for the text once a kernel has seen the word. The first fault stays.
void Progress::tell(u32 peer, u32 error, std::string text) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!fault_text_.empty()) return;
        fault_text_ = std::move(text);
    }
    __atomic_store_n(fault_.get(), fabric::proxy_fault(peer, error), __ATOMIC_RELEASE);
}

std::string Progress::fault() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return fault_text_;
}

}  // namespace deep_ep::host::proxy
