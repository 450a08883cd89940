// Carries the messages of a proxy: over a libfabric provider, or a loopback for tests.
//
// A message is written into the peer's memory together with an immediate, which the peer's transport hands to its proxy
// once the whole message has arrived. Different messages may arrive in any order. A transport is used by one thread at
// a time.
#pragma once

#include <string>
#include <vector>

#include "wire/types.h"

namespace deep_ep::host::proxy {

struct Message {
    u32 peer;
    u32 immediate;  // wire::proxy::Immediate
    u64 source;     // in this rank's heap
    u64 target;     // in the peer's
    u64 bytes;      // at least kPieceBytes
    u64 context;    // comes back with the completion
};

// The message's source has been read and its target written, or it has failed.
struct Completion {
    u64 context;
    u32 error = 0;  // the transport's own code
};

struct Events {
    std::vector<Completion> completions;
    std::vector<u32> arrivals;  // immediates
};

class Transport {
  public:
    virtual ~Transport() = default;

    virtual std::string name() const = 0;
    // Maximum size of one message in bytes.
    virtual u64 max_bytes() const = 0;
    // Network::look_up_peers().
    virtual int look_up_peers() { return -1; }
    // Returns false if it accepts no message to that peer now.
    virtual bool post(const Message& message) = 0;
    // Whether post() might accept a message, and whether poll() might find or do anything. A transport that can only
    // wait must say so, to let the caller do other work.
    virtual bool takes(u32) const { return true; }
    virtual bool has_work() const = 0;
    // Makes progress and appends the resulting events. Returns whether it has done anything.
    virtual bool poll(Events& events) = 0;
    // The text for an error code.
    virtual std::string text(u32 error) const = 0;
};

}  // namespace deep_ep::host::proxy
