// Kernels that wait for each other and do nothing else: for finding out what a GPU lets run side by side before
// anything depends on it. No operation: it knows no Buffer.
#pragma once

#include "device/device.h"
#include "kernels/common/kernel.h"

namespace deep_ep {

struct HandshakeArgs {
    u64* own;        // the one before in the ring adds here
    u64* next;       // this one adds here
    u64 turns;       // how often
    u64 timeout_ns;  // of all turns together
    u64* outcome;    // polled by the host
};

enum class Handshake : u64 { kUnderWay = 0, kShaken = 1, kTimedOut = 2 };

// One thread of the grid goes round: the others only take up their room.
DEEP_EP_KERNEL void handshake(DEEP_EP_ARGUMENT const HandshakeArgs args) {
    using device::Scope;
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const u64 deadline = device::now_ns() + args.timeout_ns;
    Handshake outcome = Handshake::kShaken;
    for (u64 turn = 1; turn <= args.turns && outcome == Handshake::kShaken; ++turn) {
        // The next kernel of the ring polls this word, or the host counts in it too: both outside this GPU's order.
        device::add_release<Scope::kSystem>(args.next, u64{1});
        const device::WaitNote note{"handshake", -1, turn, args.own};
        // Added to by the kernel before in the ring, or stored by the host; nothing else is read after it.
        const auto shaken = [&] { return device::load_acquire<Scope::kSystem>(args.own) >= turn; };
        if (!device::spin_until(shaken, deadline, &note)) outcome = Handshake::kTimedOut;
    }
    // The host polls it, and then counts what was added: released after all of that.
    device::store_release<Scope::kSystem>(args.outcome, static_cast<u64>(outcome));
}

struct HandshakeKernel : NoSharedMemory {
    static constexpr const char* kName = "handshake";
    static constexpr bool kOfAnyShape = true;
    using Args = HandshakeArgs;
    template <class>
    static constexpr auto kEntry = handshake;
};

}  // namespace deep_ep
