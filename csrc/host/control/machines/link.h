// One connection to a rank on another machine: frames go in and come out. One thread at a time uses it.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "host/control/machines/tag.h"

namespace deep_ep::host {

class Link {
  public:
    // Takes a copy of the socket, which is connected. Keys: of the frames that it sends, and of those that come. Throws
    // std::system_error.
    Link(int socket, const TagKey& own, const TagKey& theirs);
    ~Link() { close(); }
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    int socket() const { return socket_; }
    bool open() const { return socket_ >= 0; }
    void close();

    void add(wire::control::Kind kind, const void* payload, size_t bytes);
    // Nanoseconds since the other end's kernel has last acknowledged something; 0 where that is not known.
    u64 unacknowledged_ns() const;
    bool has_unsent() const { return sent_ < unsent_.size(); }
    // Sends what the connection takes without a wait. An end that it meets is left for take() to find.
    void send();

    using Take = std::function<void(wire::control::Kind, std::string_view payload)>;
    // Takes what has come, frame by frame. False: the other end is closed, or sends what no rank sends.
    bool take(const Take& take);

  private:
    bool parse(const Take& take);

    int socket_;
    const TagKey own_, theirs_;
    u64 added_ = 0, taken_ = 0;  // frames
    std::string unsent_;
    size_t sent_ = 0;  // bytes of it
    std::string come_;
};

}  // namespace deep_ep::host
