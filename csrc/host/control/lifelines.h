// What tells that a peer's process has ended: descriptors that become readable then.
#pragma once

#include <poll.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace deep_ep::host {

class Lifelines {
  public:
    // (peer, descriptor); several of one peer are allowed. They stay the caller's, which closes a peer's only
    // when they are not asked for any longer: `Runtime::gone` does not ask once that rank is left out.
    using Descriptors = std::vector<std::pair<int, int>>;

    Lifelines() = default;
    Lifelines(Descriptors sockets, Descriptors processes)
        : sockets_(std::move(sockets)), processes_(std::move(processes)) {}

    bool empty() const { return sockets_.empty() && processes_.empty(); }

    // The peer has ended, or is ending. What it has stored before is visible to loads after this: the kernel's locks
    // order them.
    bool ended(int peer) const { return readable(sockets_, peer) || readable(processes_, peer); }

    // It stores nothing any more. A process that is killed closes its files one after the other, a socket perhaps
    // before those that keep its GPU's context; its pidfd speaks after all of them. Sockets stand in where the system
    // has no pidfd.
    bool gone(int peer) const {
        const bool known =
            std::any_of(processes_.begin(), processes_.end(), [peer](const auto& one) { return one.first == peer; });
        return readable(known ? processes_ : sockets_, peer);
    }

  private:
    static bool readable(const Descriptors& descriptors, int peer) {
        for (const auto& [owner, descriptor] : descriptors) {
            if (owner != peer) continue;
            pollfd one{descriptor, POLLIN, 0};  // hang-ups are always reported
            // One that is not open any more says nothing.
            if (poll(&one, 1, 0) > 0 && (one.revents & POLLNVAL) == 0) return true;
        }
        return false;
    }

    Descriptors sockets_, processes_;
};

}  // namespace deep_ep::host
