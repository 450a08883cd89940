// Fabric `proxy`: a host thread sends what kernels leave for it as commands in a ring. It is for NICs that a GPU cannot
// drive itself, and for networks without NICs. A put's signal is a total that the receiver's host stores once all of
// the put has arrived, in a word in the far part of its heap (wire/far_words.h).
//
// Ring and progress are in memory that both kernels and host reach: host memory, pinned for a GPU. State that only
// kernels use, the counts of a ring, is in their own memory and is accessed at device scope. A thread reserves slots
// only when they are free, and then fills them without waiting. Therefore a kernel that gives up leaves no gap in a
// ring.
#pragma once

#include "fabric/peers.h"
#include "wire/outcome.h"
#include "wire/proxy.h"

namespace deep_ep::fabric {

// The host's report to the kernels about a ring. Only the host stores these words; kernels load them.
struct ProxyProgress {
    alignas(64) u64 taken;    // commands that the host has copied out: their slots are free
    alignas(64) u64 retired;  // of this many first commands, the sources have been read and the targets written
};

struct ProxyRing {
    wire::proxy::Command* commands;
    const ProxyProgress* progress;
    u64 reserved;  // commands reserved by threads, counted since the ring was made
    u64 free;      // `reserved` may grow up to here: at most `taken` plus a ring's length
};

// One per Buffer, in device memory.
struct Proxy {
    static constexpr const char* kName = "proxy";
    ProxyRing* rings;
    u32 count;         // number of rings: thread blocks take turns
    u32 commands;      // per ring; a power of two, at least kMaxPieces
    const u64* fault;  // proxy_fault(); in host memory, stored once by the host
};

// The first put that has failed: its peer and its error.
constexpr u64 proxy_fault(u32 peer, u32 error) { return u64{error} << 32 | (peer + 1); }

namespace proxy {

using device::Scope;

// One thread: returns whether the slots up to position `end` are free, as far as is known here or, failing that,
// according to the host. The acquire of `taken` pairs with the host's release: the host has copied the contents of the
// slots.
DEEP_EP_DEVICE bool has_room(ProxyRing& ring, u32 commands, u64 end) {
    u64 known = device::load_acquire<Scope::kDevice>(&ring.free);
    if (end <= known) return true;
    const u64 now = device::load_acquire<Scope::kSystem>(&ring.progress->taken) + commands;
    while (known < now) {
        const u64 before = known;
        // Release: a thread that acquires `free` may write where the host has read. Litmus: nic_completion.
        known = device::cas_release<Scope::kDevice>(&ring.free, before, now);
        if (known == before) break;
    }
    return end <= now;
}

// One thread: takes `count` consecutive slots. Returns false if a bounded wait for room has ended without room.
template <class Waiter>
DEEP_EP_DEVICE bool reserve(ProxyRing& ring, u32 commands, Waiter& waiter, u32 count, u64& begin) {
    // It only hands out positions; the upper half of a command orders it.
    begin = device::load_relaxed<Scope::kDevice>(&ring.reserved);
    for (;;) {
        const u64 end = begin + count;
        if (!has_room(ring, commands, end) &&
            !waiter.wait(wire::Phase::kPost, -1, &ring.progress->taken, end - commands,
                         [&] { return has_room(ring, commands, end); })) {
            return false;
        }
        const u64 found = device::cas_relaxed<Scope::kDevice>(&ring.reserved, begin, end);
        if (found == begin) return true;
        begin = found;
    }
}

// One thread: fills a command. The host acquires the upper half and then reads the lower half and, in the heap, what
// this thread's warp has put there. Litmus: proxy_command.
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

// The block: its first thread waits for everything posted so far, including other operations. The host completes every
// command without the help of a kernel, so no operation is held up for another. Litmus: slot_given_back.
template <class Waiter>
DEEP_EP_DEVICE bool quiet(const Peers&, Proxy& net, Waiter& waiter, Completion&) {
    if (threadIdx.x != 0) return true;
    bool done = true;
    for (u32 i = 0; i < net.count; ++i) {
        const ProxyRing& ring = net.rings[i];
        const u64 posted = device::load_relaxed<device::Scope::kDevice>(&ring.reserved);
        done = waiter.wait_word(wire::Phase::kQuiet, -1, &ring.progress->retired, posted) && done;
    }
    return done;
}

// Relaxed: it ends a wait, and vouches for no other memory.
DEEP_EP_DEVICE bool fault(const Peers&, const Proxy& net, Fault& found) {
    const u64 word = device::load_relaxed<device::Scope::kSystem>(net.fault);
    if (word == 0) return false;
    found = {static_cast<u32>(word) - 1, 0, word >> 32};
    return true;
}

}  // namespace deep_ep::fabric
