// Fabric `proxy`: a thread of the host sends what kernels leave for it as commands in a ring. For NICs that a GPU
// cannot drive itself, and for networks without any. A put's signal is a total that the receiver's host stores once all
// of the put has arrived, in a word of its own memory (wire/host_words.h).
//
// Ring and meeting lie where kernels and host both reach them: memory of the host, pinned for a GPU. What kernels alone
// use, a ring's counts, lies in their own memory and is accessed at device scope. A thread reserves slots only when
// they are free, and then fills them without a wait: so a kernel that gives up leaves no gap in a ring.
#pragma once

#include "fabric/peers.h"
#include "wire/outcome.h"
#include "wire/proxy.h"

namespace deep_ep::fabric {

// What the host tells the kernels about a ring. It alone stores these, kernels load.
struct ProxyMeeting {
    alignas(64) u64 taken;    // commands that it has copied out: their slots are free
    alignas(64) u64 retired;  // of the first so many commands the sources have been read and the targets written
};

struct ProxyRing {
    wire::proxy::Command* commands;
    const ProxyMeeting* meeting;
    u64 reserved;  // commands, counted since the ring was made: handed out to threads
    u64 free;      // reserved may grow up to here: at most `taken` and a ring's length
};

// One per Buffer, in device memory.
struct Proxy {
    static constexpr const char* kName = "proxy";
    static constexpr bool kHostStoresWords = true;
    ProxyRing* rings;
    u32 count;         // of rings: blocks take turns
    u32 commands;      // of each ring; a power of two, at least kMaxPieces
    const u64* fault;  // proxy_fault(); of the host, which stores it once
};

// The first put that has failed: to which peer, and in what way.
constexpr u64 proxy_fault(u32 peer, u32 error) { return u64{error} << 32 | (peer + 1); }

namespace proxy {

using device::Scope;

// One thread: whether the slots up to position `end` are free, as far as is known here, or else as the host says. The
// acquire of `taken` pairs with the host's release: it has copied what the slots held.
DEEP_EP_DEVICE bool has_room(ProxyRing& ring, u32 commands, u64 end) {
    u64 known = device::load_acquire<Scope::kDevice>(&ring.free);
    if (end <= known) return true;
    const u64 now = device::load_acquire<Scope::kSystem>(&ring.meeting->taken) + commands;
    while (known < now) {
        const u64 before = known;
        // Release: a thread that acquires `free` may write where the host has read. Litmus: nic_completion.
        known = device::cas_release<Scope::kDevice>(&ring.free, before, now);
        if (known == before) break;
    }
    return end <= now;
}

// One thread: takes `count` slots that follow each other. False: a bounded wait for room has ended without.
template <class Waiter>
DEEP_EP_DEVICE bool reserve(ProxyRing& ring, u32 commands, Waiter& waiter, u32 count, u64& begin) {
    // Only hands out positions; what orders a command is its upper half.
    begin = device::load_relaxed<Scope::kDevice>(&ring.reserved);
    for (;;) {
        const u64 end = begin + count;
        if (!has_room(ring, commands, end) && !waiter.wait(wire::Phase::kPost, -1, &ring.meeting->taken, end - commands,
                                                           [&] { return has_room(ring, commands, end); })) {
            return false;
        }
        const u64 found = device::cas_relaxed<Scope::kDevice>(&ring.reserved, begin, end);
        if (found == begin) return true;
        begin = found;
    }
}

// One thread: the host acquires the upper half, and then reads the lower one and, in the heap, what this thread's warp
// has put there. Litmus: proxy_command.
DEEP_EP_DEVICE void fill(ProxyRing& ring, u32 commands, u64 position, u32 operation, const Piece& piece, u32 to,
                         u32 word) {
    wire::proxy::Command& command = ring.commands[position & (commands - 1)];
    const u64 lap = wire::proxy::lap_at(position, commands);
    device::store_relaxed<Scope::kSystem>(&command.low,
                                          wire::proxy::command_low(lap, operation, piece.bytes, piece.source));
    device::store_release<Scope::kSystem>(&command.high, wire::proxy::command_high(lap, to, word, piece.target));
}

}  // namespace proxy

// One thread.
template <class Waiter>
DEEP_EP_DEVICE_CALL bool post(const Peers&, Proxy& net, Waiter& waiter, Completion&, u32 to, const Piece* pieces,
                              u32 count, Word word) {
    ProxyRing& ring = net.rings[blockIdx.x % net.count];
    const u32 needed = count != 0 ? count : 1;
    u64 begin = 0;
    if (!proxy::reserve(ring, net.commands, waiter, needed, begin)) return false;
    if (count == 0) proxy::fill(ring, net.commands, begin, wire::proxy::kSignal, {}, to, word.number);
    for (u32 i = 0; i < count; ++i) {
        const u32 operation = i + 1 < count ? wire::proxy::kPart : wire::proxy::kLast;
        proxy::fill(ring, net.commands, begin + i, operation, pieces[i], to, word.number);
    }
    return true;
}

// The block: its first thread waits for all that has been posted so far, of other operations too. The host ends every
// command without help of a kernel, so this holds no operation up for another. Litmus: slot_given_back.
template <class Waiter>
DEEP_EP_DEVICE bool quiet(const Peers&, Proxy& net, Waiter& waiter, Completion&) {
    if (threadIdx.x != 0) return true;
    bool done = true;
    for (u32 i = 0; i < net.count; ++i) {
        const ProxyRing& ring = net.rings[i];
        const u64 posted = device::load_relaxed<device::Scope::kDevice>(&ring.reserved);
        done = waiter.wait_word(wire::Phase::kQuiet, -1, &ring.meeting->retired, posted) && done;
    }
    return done;
}

// Relaxed: it ends a wait, and says nothing of other memory.
DEEP_EP_DEVICE bool fault(const Peers&, const Proxy& net, Fault& found) {
    const u64 word = device::load_relaxed<device::Scope::kSystem>(net.fault);
    if (word == 0) return false;
    found = {static_cast<u32>(word) - 1, 0, word >> 32};
    return true;
}

}  // namespace deep_ep::fabric
