// The sending side of a proxy: commands become messages, which wait in one queue per peer, so that a peer that accepts
// none does not delay the others (P11).
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "host/network/nic_options.h"
#include "host/network/proxy/command_rings.h"
#include "host/network/proxy/transport.h"

namespace deep_ep::host::proxy {

// Bounds the share of a network's buffers that a stalled peer may occupy.
constexpr u64 kMaxBytesToPeer = 16ull << 20;

class Sender {
  public:
    struct Fault {
        u32 peer;
        u32 error;
    };
    // `scratch`: the place in every heap for messages without bytes. `closed`: whether a peer is masked or has left, so
    // that nothing more is sent to it.
    Sender(u32 rank, u32 ranks, u32 generation, u64 scratch, CommandRings& rings, Transport& transport,
           std::function<bool(u32 peer)> closed);

    // Takes up to `commands` commands from each ring. Returns whether there were any.
    bool take(u32 commands);
    // Hands the transport as many messages as it accepts. Returns whether it accepted any.
    bool post();
    bool has_work() const;
    // Whether a message is in flight or waits for its link.
    bool is_open() const { return waiting_ != 0 || on_their_way_.size() != free_places_.size(); }
    // The same, for the peers for which `counts` holds.
    bool is_open_to(const std::function<bool(u32 peer)>& counts) const;
    void completed(const Completion& completion);

    // The faults since the last call: nothing reaches these peers any more.
    std::vector<Fault> faults();
    const std::vector<nic::Counters>& counters() const { return counters_; }

  private:
    struct Waiting {
        Message message;
        u32 word;
        u32 pieces;
        CommandPlace of;
    };
    // The messages to one word of a peer. Those numbered below `delivered` have been delivered, and so has message
    // delivered + i if bit i of `beyond` is set.
    struct Window {
        u64 sent = 0;
        u64 delivered = 0;
        u64 beyond = 0;
        bool open() const { return sent < delivered + wire::proxy::kWindow; }
        void end(u64 number);
    };
    struct Link {
        std::deque<Waiting> queue;
        std::vector<Window> windows;  // by word
        u64 bytes_on_their_way = 0;
        bool dead = false;
        std::vector<CommandPlace> lost;  // commands of messages that have not arrived and never will
    };
    // A message handed to the transport. `Message::context` is its index in `on_their_way_`.
    struct OnItsWay {
        u32 peer;
        u32 word;
        u64 number;
        u64 bytes;
        CommandPlace of;
    };

    void accept(const Taken& taken);
    void lose(Link& link);
    void forget(Link& link);
    bool may_post(u32 peer, const Link& link) const;
    bool post_next(u32 peer, Link& link);

    const u32 rank_, generation_;
    const u64 scratch_;
    CommandRings& rings_;
    Transport& transport_;
    const std::function<bool(u32)> closed_;
    std::vector<Link> links_;        // by peer
    std::vector<u32> put_messages_;  // by ring: messages so far of the put whose commands are being taken
    std::vector<OnItsWay> on_their_way_;
    std::vector<u32> free_places_;
    std::vector<Fault> faults_;
    std::vector<nic::Counters> counters_;
    u32 waiting_ = 0;  // links with a queue
    u32 dead_ = 0;     // links that have failed
};

}  // namespace deep_ep::host::proxy
