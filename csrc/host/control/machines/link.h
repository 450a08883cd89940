// One connection to a rank on another machine, which carries frames in both directions. Used by one thread at a time.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "host/control/machines/tag.h"

namespace deep_ep::host {

class Link {
  public:
    // Duplicates the socket, which is connected. The keys are those of outgoing and of incoming frames. Throws
    // std::system_error.
    Link(int socket, const TagKey& own, const TagKey& theirs);
    ~Link() { close(); }
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    int socket() const { return socket_; }
    bool open() const { return socket_ >= 0; }
    void close();

    void add(wire::control::Kind kind, const void* payload, size_t bytes);
    // Nanoseconds since the operating system of the other end has last acknowledged something; 0 if unknown.
    u64 unacknowledged_ns() const;
    bool has_unsent() const { return sent_ < unsent_.size(); }
    // Sends as much as the connection accepts without blocking. A closed connection is left for take() to find.
    void send();

    using Take = std::function<void(wire::control::Kind, std::string_view payload)>;
    // Takes received data, frame by frame. Returns false if the other end is closed, or sends invalid frames.
    bool take(const Take& take);

  private:
    bool parse(const Take& take);

    int socket_;
    const TagKey own_, theirs_;
    u64 added_ = 0, taken_ = 0;  // frames
    std::string unsent_;
    size_t sent_ = 0;  // bytes of `unsent_` already sent
    std::string come_;
};

}  // namespace deep_ep::host
