// Kernels that only wait for each other, for finding out which kernels a GPU runs concurrently before anything depends
// on it. This is not an operation: it knows no Buffer.
#pragma once

#include "device/device.h"
#include "kernels/common/kernel.h"

namespace deep_ep {

struct HandshakeArgs {
    u64* own;        // the previous kernel of the ring adds here
    u64* next;       // this kernel adds here
    u64 turns;       // number of turns
    u64 timeout_ns;  // of all turns together
    u64* outcome;    // polled by the host
};

enum class Handshake : u64 { kUnderWay = 0, kShaken = 1, kTimedOut = 2 };

// Only one thread of the grid takes part; the others merely occupy resources.
DEEP_EP_KERNEL void handshake(DEEP_EP_ARGUMENT const HandshakeArgs args) {
    using device::Scope;
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const u64 deadline = device::now_ns() + args.timeout_ns;
    Handshake outcome = Handshake::kShaken;
    for (u64 turn = 1; turn <= args.turns && outcome == Handshake::kShaken; ++turn) {
        // The next kernel of the ring polls this word, and the host may take a place in the ring too. Both are outside
        // this GPU's order.
        device::add_release<Scope::kSystem>(args.next, u64{1});
        const device::WaitNote note{"handshake", -1, turn, args.own};
        // The previous kernel in the ring adds to it, or the host stores it; nothing else is read after it.
        const auto shaken = [&] { return device::load_acquire<Scope::kSystem>(args.own) >= turn; };
        if (!device::spin_until(shaken, deadline, &note)) outcome = Handshake::kTimedOut;
    }
    // The host polls it and then counts what was added: the release follows all of that.
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
