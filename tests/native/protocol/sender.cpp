#include "sender.h"

#include <map>
#include <random>
#include <vector>

#include "../program.h"
#include "host/network/proxy/sender.h"
#include "sim/host/memory.h"

namespace protocol::sender {

using namespace deep_ep;
using namespace deep_ep::host::proxy;
using planted::expect;

namespace {

constexpr u32 kRanks = 3, kRings = 2, kCommands = 64, kMaxBytes = 64, kWord = 5;

// The test decides whether posts are accepted, and when they end.
class ToldNetwork final : public Transport {
  public:
    std::vector<Message> taken;
    std::vector<bool> takes_of = std::vector<bool>(kRanks, true);
    u64 most = kMaxBytes;

    std::string name() const override { return "a network of a test"; }
    u64 max_bytes() const override { return most; }
    bool takes(u32 peer) const override { return takes_of[peer]; }
    bool has_work() const override { return false; }
    bool post(const Message& message) override {
        if (!takes(message.peer)) return false;
        taken.push_back(message);
        return true;
    }
    bool poll(Events&) override { return false; }
    std::string text(u32) const override { return "told"; }
};

struct World {
    host::CpuMemory memory;
    CommandRings rings{memory, 0, kRings, kCommands};
    ToldNetwork network;
    std::vector<bool> closed = std::vector<bool>(kRanks);
    Sender sender{0, kRanks, 1, 0, rings, network, [this](u32 peer) { return closed[peer]; }};
    u64 posted = 0, posted_to_other = 0;  // to the first ring, and to the other one

    // The posts of a kernel, without its waits.
    void post(u32 peer, const std::vector<u64>& pieces, u32 word = kWord, u32 ring = 0) {
        u64& position = ring == 0 ? posted : posted_to_other;
        for (size_t i = 0; i < pieces.size(); ++i) {
            const u32 operation = i + 1 < pieces.size() ? wire::proxy::kPart : wire::proxy::kLast;
            wire::proxy::Command& slot = rings.device_rings()[ring].commands[position % kCommands];
            const u64 lap = wire::proxy::lap_at(position++, kCommands);
            slot.low = wire::proxy::command_low(lap, operation, pieces[i], 1024);
            slot.high = wire::proxy::command_high(lap, peer, word, 2048);
        }
    }
    void step(u32 commands = kCommands) {
        sender.take(commands);
        while (sender.post()) {
        }
        rings.publish();
    }
    u64 retired(u32 ring = 0) const { return rings.device_rings()[ring].progress->retired; }
    // Ends a message that the network has accepted.
    void end(size_t at, u32 error = 0) {
        sender.completed({network.taken[at].context, error});
        rings.publish();
    }
};

wire::proxy::Immediate immediate(const Message& message) { return wire::proxy::unpack(message.immediate); }

// However a put is cut into pieces, its messages add one unit in total, and carry all of its bytes.
void cuts(std::mt19937_64& random) {
    World world;
    u64 bytes = 0;
    std::vector<u64> pieces;
    for (u64 i = 1 + random() % 3; i != 0; --i) {
        pieces.push_back(wire::kPieceBytes * (1 + random() % 12));
        bytes += pieces.back();
    }
    world.post(1, pieces);
    world.step();
    u64 added = 0, carried = 0;
    for (const Message& message : world.network.taken) {
        added += wire::proxy::share(immediate(message).pieces);
        carried += message.bytes;
        expect(message.bytes <= kMaxBytes, "a message is larger than the network accepts");
    }
    expect(added == wire::kUnit && carried == bytes, "a put's messages do not add up");
}

// A put whose link fails between two of its commands leaves nothing behind for the next one.
void broken_put() {
    World world;
    world.post(1, {16, 16});
    world.step(1);  // the first command alone
    world.end(0, 7);
    const std::vector<Sender::Fault> faults = world.sender.faults();
    expect(faults.size() == 1 && faults[0].peer == 1 && faults[0].error == 7, "a failed link is not reported");
    world.step();
    world.post(2, {16, 16});
    world.step();
    expect(world.network.taken.size() == 3, "the next put is not sent");
    expect(immediate(world.network.taken[2]).pieces == 2, "a put counts the messages of a lost one");
}

// A command that a link has lost, and later ones, are not done until the peer is known to have ended.
void lost() {
    World world;
    world.post(1, {16});
    world.post(1, {16});
    world.post(2, {16});
    world.step();
    expect(world.network.taken.size() == 3, "not all messages are sent");
    world.end(0, 7);
    world.end(1);
    world.end(2);
    world.post(1, {16});
    world.step();
    expect(world.retired() == 0, "a command that a link has lost counts as done");
    expect(world.network.taken.size() == 3, "a failed link is used");
    world.closed[1] = true;
    world.step();
    expect(world.retired() == world.posted, "a command for a rank that has ended is waited for");
}

// Each ring's commands are done in its own order: losses of one ring hold up no command of another. A command that
// waits for a failed link, or arrives for it later, is not done in either ring.
void rings_apart() {
    World world;
    world.post(1, {16});
    world.step();
    world.network.takes_of[1] = false;
    world.post(2, {16}, kWord, 1);
    world.post(1, {16}, kWord, 1);
    world.step();
    world.end(1);
    expect(world.retired(0) == 0 && world.retired(1) == 1, "rings hold each other up");
    world.end(0, 7);
    world.step();
    expect(world.retired(1) == 1, "a command that waits for a failed link counts as done");
    world.closed[1] = true;
    world.step();
    expect(world.retired(0) == 1 && world.retired(1) == 2, "a command for a rank that has ended is waited for");
}

// The same for a command that arrives after the link has failed.
void late_command() {
    World world;
    world.post(1, {16});
    world.step();
    world.end(0, 7);
    world.post(1, {16}, kWord, 1);
    world.step();
    expect(world.retired(1) == 0, "a command for a failed link counts as done");
}

// Commands of two puts, taken alternately from two rings, are told apart.
void puts_by_turns() {
    World world;
    world.post(1, {16, 16});
    world.post(2, {16, 16, 16}, kWord, 1);
    for (int i = 0; i < 3; ++i) world.step(1);
    u32 counted[kRanks] = {};
    for (const Message& message : world.network.taken) counted[message.peer] += immediate(message).pieces;
    expect(counted[1] == 2 && counted[2] == 3, "puts of two rings are counted together");
}

// A peer that accepts nothing, and one whose messages do not end, hold up no other peer (P11).
void stopped() {
    World world;
    world.network.takes_of[1] = false;
    for (u32 i = 0; i < kCommands / 2; ++i) {
        world.post(1, {16});
        world.post(2, {16}, i);
    }
    world.step();
    u32 sent = 0;
    for (const Message& message : world.network.taken) sent += message.peer == 2;
    expect(sent == kCommands / 2, "a stopped rank holds up another");
    expect(world.rings.device_rings()->progress->taken == kCommands, "commands stay in the ring");
}

// The numbers of messages to a word are distinguishable within a window: a message is sent only once all messages a
// window before it have been delivered, in any order.
void window(std::mt19937_64& random) {
    World world;
    constexpr u32 kPuts = 3 * wire::proxy::kSequences;
    std::map<u64, u32> open;  // number -> index among the messages taken
    u32 next = 0, posted = 0;
    u64 oldest = 0;
    while (next < kPuts || !open.empty()) {
        for (; posted < kPuts && world.posted < world.retired() + kCommands; ++posted) world.post(1, {16});
        world.step();
        for (; next < world.network.taken.size(); ++next) open[next] = next;
        if (!open.empty()) oldest = open.begin()->first;
        expect(next <= oldest + wire::proxy::kWindow, "a message leaves the window");
        expect(!open.empty(), "nothing is sent although the window is open");
        expect(immediate(world.network.taken[next - 1]).sequence == (next - 1) % wire::proxy::kSequences, "its number");
        auto one = open.begin();
        std::advance(one, static_cast<long>(random() % open.size()));
        world.end(one->second);
        open.erase(one);
    }
    expect(world.retired() == kPuts, "a put is not done");
}

// The bytes in flight to a peer are bounded; a single message is always sent.
void bounded() {
    World world;
    world.network.most = 2 * kMaxBytesToPeer;
    world.post(1, {kMaxBytesToPeer + 16});
    world.post(1, {kMaxBytesToPeer / 2});
    world.post(1, {kMaxBytesToPeer / 2});
    world.post(1, {16});
    world.step();
    expect(world.network.taken.size() == 1, "not exactly one message is sent beyond the bound");
    world.end(0);
    world.step();
    expect(world.network.taken.size() == 3, "fewer messages are sent than the bound allows");
    world.end(1);
    world.step();
    expect(world.network.taken.size() == 4, "a message that waits for the bound is not sent");
}

}  // namespace

void run(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 20; ++i) cuts(random);
    broken_put();
    lost();
    rings_apart();
    late_command();
    puts_by_turns();
    stopped();
    window(random);
    bounded();
}

}  // namespace protocol::sender
