// The rings of fabric/proxy.h as the host sees them: commands are taken out in order, and told done in order.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "fabric/proxy.h"
#include "host/heap/memory.h"
#include "observe/observer.h"

namespace deep_ep::host::proxy {

struct CommandPlace {
    u32 ring;
    u64 position;
};

// A command, and where it was.
struct Taken {
    wire::proxy::Command command;
    CommandPlace place;
};

class CommandRings {
  public:
    CommandRings(Memory& memory, u32 rank, u32 rings, u32 commands);
    ~CommandRings();
    CommandRings(const CommandRings&) = delete;
    CommandRings& operator=(const CommandRings&) = delete;

    fabric::ProxyRing* device_rings() const { return device_.get(); }
    u32 count() const { return static_cast<u32>(rings_.size()); }
    u32 commands() const { return commands_; }

    // Whether some kernel has left a command.
    bool has_next() const;
    // The next command of a ring. Its slot is given back by publish().
    bool take(u32 ring, Taken& taken);
    // `messages` are what a command has become; it is done when as many have ended.
    void begin(const CommandPlace& of, u32 messages);
    void end_message(const CommandPlace& of);
    // Tells kernels which slots are free, and what is done.
    void publish();
    // All that kernels have posted is done. They post no more.
    bool idle() const;

  private:
    struct Ring {
        u64 taken = 0;
        u64 retired = 0;
        std::deque<u32> left;  // messages of each command from `retired` on that have not ended
    };
    const wire::proxy::Command& slot(u32 ring, u64 position) const {
        return slots_.get()[u64{ring} * commands_ + (position & (commands_ - 1))];
    }
    bool is_ready(u32 ring, wire::proxy::Command& command) const;

    Memory& memory_;
    const observe::Accessor proxy_;
    const u32 commands_;
    const std::shared_ptr<wire::proxy::Command> slots_;     // [rings, commands]
    const std::shared_ptr<fabric::ProxyMeeting> meetings_;  // [rings]
    const std::shared_ptr<fabric::ProxyRing> device_;       // [rings]
    std::vector<Ring> rings_;
};

}  // namespace deep_ep::host::proxy
