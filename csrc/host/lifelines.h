// What tells that a peer's process has ended: descriptors that become readable then.
#pragma once

#include <poll.h>

#include <utility>
#include <vector>

namespace deep_ep::host {

class Lifelines {
  public:
    Lifelines() = default;
    // (peer, descriptor); several of one peer are allowed. They stay the caller's, who closes a peer's only when nobody
    // asks for it any more: `Runtime::gone` does not once it is left out.
    explicit Lifelines(const std::vector<std::pair<int, int>>& descriptors) : descriptors_(descriptors) {}

    bool empty() const { return descriptors_.empty(); }

    // What the peer has stored before it ended is visible to who then loads it: the kernel's locks order that.
    bool ended(int peer) const {
        for (const auto& [owner, descriptor] : descriptors_) {
            if (owner != peer) continue;
            pollfd one{descriptor, POLLIN, 0};  // hang-ups are always reported
            // One that is not open any more says nothing.
            if (poll(&one, 1, 0) > 0 && (one.revents & POLLNVAL) == 0) return true;
        }
        return false;
    }

  private:
    std::vector<std::pair<int, int>> descriptors_;
};

}  // namespace deep_ep::host
