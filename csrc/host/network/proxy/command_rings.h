// The host side of the rings of fabric/proxy.h: commands are taken in order and retired in order.
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

// A command and its place in the ring.
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

    // Whether any ring has a command.
    bool has_next() const;
    // Takes the next command of a ring. publish() gives its slot back.
    bool take(u32 ring, Taken& taken);
    // `messages`: into how many messages the command has been split. It is done when all of them have ended.
    void begin(const CommandPlace& of, u32 messages);
    void end_message(const CommandPlace& of);
    // Publishes to kernels which slots are free and which commands are done.
    void publish();
    // Whether all commands that kernels have posted are done. The caller ensures that no more are posted.
    bool idle() const;

  private:
    struct Ring {
        u64 taken = 0;
        u64 retired = 0;
        std::deque<u32> left;  // for each command from `retired` on, its messages that have not ended
    };
    const wire::proxy::Command& slot(u32 ring, u64 position) const {
        return slots_.get()[u64{ring} * commands_ + (position & (commands_ - 1))];
    }
    bool is_ready(u32 ring, wire::proxy::Command& command) const;

    Memory& memory_;
    const observe::Accessor proxy_;
    const u32 commands_;
    const std::shared_ptr<wire::proxy::Command> slots_;      // [rings, commands]
    const std::shared_ptr<fabric::ProxyProgress> progress_;  // [rings]
    const std::shared_ptr<fabric::ProxyRing> device_;        // [rings]
    std::vector<Ring> rings_;
};

}  // namespace deep_ep::host::proxy
