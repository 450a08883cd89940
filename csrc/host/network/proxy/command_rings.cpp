#include "host/network/proxy/command_rings.h"

#include "host/heap/host_word.h"

namespace deep_ep::host::proxy {

using wire::proxy::Command;

CommandRings::CommandRings(Memory& memory, u32 rank, u32 rings, u32 commands)
    : memory_(memory),
      proxy_(observe::proxy(rank)),
      commands_(commands),
      slots_(std::static_pointer_cast<Command>(memory.make_polled(u64{rings} * commands * sizeof(Command)))),
      progress_(
          std::static_pointer_cast<fabric::ProxyProgress>(memory.make_polled(rings * sizeof(fabric::ProxyProgress)))),
      device_(std::static_pointer_cast<fabric::ProxyRing>(memory.make_private(rings * sizeof(fabric::ProxyRing)))),
      rings_(rings) {
    std::vector<fabric::ProxyRing> made;
    for (u32 ring = 0; ring < rings; ++ring) {
        made.push_back({slots_.get() + u64{ring} * commands, progress_.get() + ring, 0, commands});
    }
    memory.write(device_.get(), made.data(), made.size() * sizeof(fabric::ProxyRing));
    observe::begin(proxy_);
}

CommandRings::~CommandRings() { observe::end(proxy_); }

bool CommandRings::is_ready(u32 ring, Command& command) const {
    const u64 position = rings_[ring].taken, lap = wire::proxy::lap_at(position, commands_);
    const Command& at = slot(ring, position);
    // Pairs with the posting thread's release at system scope, on a GPU across the bus: the lower half and the data its
    // warp has built in the heap are visible. The lower half has its own lap in case stores to this memory become
    // visible in another order.
    command.high = observe::load_acquire(proxy_, &at.high);
    if (wire::proxy::lap_of(command.high) != lap) return false;
    command.low = observe::load_acquire(proxy_, &at.low);
    return wire::proxy::lap_of(command.low) == lap;
}

bool CommandRings::has_next() const {
    Command command;
    for (u32 ring = 0; ring < count(); ++ring) {
        if (is_ready(ring, command)) return true;
    }
    return false;
}

bool CommandRings::take(u32 ring, Taken& taken) {
    if (!is_ready(ring, taken.command)) return false;
    taken.place = {ring, rings_[ring].taken++};
    return true;
}

void CommandRings::begin(const CommandPlace& of, u32 messages) { rings_[of.ring].left.push_back(messages); }

void CommandRings::end_message(const CommandPlace& of) {
    Ring& ring = rings_[of.ring];
    --ring.left[of.position - ring.retired];
}

void CommandRings::publish() {
    for (u32 i = 0; i < count(); ++i) {
        Ring& ring = rings_[i];
        fabric::ProxyProgress& progress = progress_.get()[i];
        while (!ring.left.empty() && ring.left.front() == 0) {
            ring.left.pop_front();
            ++ring.retired;
        }
        // Kernels acquire both at system scope: a slot may be overwritten once it has been copied, a source once it has
        // been read.
        if (__atomic_load_n(&progress.taken, __ATOMIC_RELAXED) != ring.taken) {
            observe::store_release(proxy_, &progress.taken, ring.taken);
        }
        if (__atomic_load_n(&progress.retired, __ATOMIC_RELAXED) != ring.retired) {
            observe::store_release(proxy_, &progress.retired, ring.retired);
        }
    }
}

bool CommandRings::idle() const {
    for (u32 i = 0; i < count(); ++i) {
        const u64 reserved = memory_.load_word(host_word(device_.get()[i].reserved));
        if (__atomic_load_n(&progress_.get()[i].retired, __ATOMIC_ACQUIRE) != reserved) return false;
    }
    return true;
}

}  // namespace deep_ep::host::proxy
