// Descriptors that become readable when a peer's process has ended.
#pragma once

#include <poll.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace deep_ep::host {

class Lifelines {
  public:
    // (peer, descriptor); a peer may have several. The caller keeps ownership, and closes those of a peer only when
    // they are no longer queried: `Runtime::gone` does not query them once that rank is left out.
    using Descriptors = std::vector<std::pair<int, int>>;

    Lifelines() = default;
    Lifelines(Descriptors sockets, Descriptors processes)
        : sockets_(std::move(sockets)), processes_(std::move(processes)) {}

    bool empty() const { return sockets_.empty() && processes_.empty(); }

    // Whether the peer has ended or is ending. Its earlier stores are visible to loads after this call: the locks of
    // the operating system's kernel order them.
    bool ended(int peer) const { return readable(sockets_, peer) || readable(processes_, peer); }

    // Whether it stores nothing any more. A killed process closes its files one after the other, and may close a socket
    // before the files that keep its GPU context alive; its pidfd becomes readable after all of them. Sockets are used
    // only if the system has no pidfd.
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
            // A descriptor that is no longer open says nothing.
            if (poll(&one, 1, 0) > 0 && (one.revents & POLLNVAL) == 0) return true;
        }
        return false;
    }

    Descriptors sockets_, processes_;
};

}  // namespace deep_ep::host
