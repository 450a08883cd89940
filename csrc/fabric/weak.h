// Fabric `weak`, for tests: the weakest network on which the protocol must work. A put becomes a command for an agent
// that waits for a random time, copies the pieces in random order and adds to the signal word last; puts overtake each
// other freely.
//
// This is the kernel side; the agent is sim/network/weak/agent.cpp.
#pragma once

#include "fabric/peers.h"
#include "wire/outcome.h"

namespace deep_ep::fabric {

struct WeakCommand {
    u64 ready;  // position + 1 once the command is written: the agent polls it
    Completion* completion;
    u64 word_offset;
    u32 to;
    u32 count;
    Piece pieces[kMaxPieces];
};

// A ring in this rank's memory. Many kernel threads post; one agent takes.
struct WeakQueue {
    static constexpr const char* kName = "weak";
    static constexpr u32 kCapacity = 1024;
    u64 posted;  // positions reserved by kernel threads
    u64 taken;   // positions that the agent has copied out; their slots are free again
    WeakCommand commands[kCapacity];
};

// One thread.
template <class Waiter>
DEEP_EP_DEVICE_CALL bool post(const Peers&, WeakQueue& queue, Waiter& waiter, Completion& completion, u32 to,
                              const Piece* pieces, u32 count, Word word) {
    // It only hands out positions; `ready` below orders the command.
    const u64 position = device::fetch_add_relaxed<device::Scope::kDevice>(&queue.posted, 1ull);
    // Back-pressure. The agent's release of `taken` says that it has read the slot's last command. All peers share the
    // ring, so a masked peer is no reason to leave a gap in it.
    if (position >= WeakQueue::kCapacity &&
        !waiter.wait_word(wire::Phase::kPost, -1, &queue.taken, position - WeakQueue::kCapacity + 1)) {
        return false;
    }
    device::add_relaxed<device::Scope::kDevice>(&completion.posted,
                                                1ull);  // read after the thread blocks have met (quiet)
    WeakCommand& command = queue.commands[position % WeakQueue::kCapacity];
    command.completion = &completion;
    command.word_offset = word.offset;
    command.to = to;
    command.count = count;
    for (u32 i = 0; i < count; ++i) command.pieces[i] = pieces[i];
    // The agent acquires `ready` and then reads the command and, through it, what this warp has built in the heap.
    device::store_release<device::Scope::kSystem>(&command.ready, position + 1);
    return true;
}

// The block: its first thread waits. The agent adds to `completed` (release, system scope) once it has read a put's
// pieces.
template <class Waiter>
DEEP_EP_DEVICE bool quiet(const Peers&, WeakQueue&, Waiter& waiter, Completion& completion) {
    if (threadIdx.x != 0) return true;
    const u64 posted = device::load_relaxed<device::Scope::kDevice>(&completion.posted);
    return waiter.wait_word(wire::Phase::kQuiet, -1, &completion.completed, posted);
}

// Its agent rejects no request.
DEEP_EP_DEVICE bool fault(const Peers&, const WeakQueue&, Fault&) { return false; }

}  // namespace deep_ep::fabric
