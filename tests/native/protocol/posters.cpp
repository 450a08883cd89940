#include "posters.h"

#include <atomic>

#include "../program.h"
#include "fabric/fabric.h"
#include "two_heaps.h"

namespace protocol::posters {

using namespace deep_ep;
using namespace deep_ep::device;
using planted::expect;

constexpr u32 kPutBytes = 96, kPieces = 2;
constexpr u32 kGeneration = 1;
constexpr u64 kShift = 416;  // rows are at another offset at the receiver, so keys end elsewhere too

// Each poster has a signal word, from rank 0's first kinds.
struct Sizes {
    u32 blocks, warps, puts;  // of a kernel; puts of each warp
    wire::HeapLayout layout{2, 1, 0, 0};

    Sizes(u32 blocks, u32 warps, u32 puts) : blocks(blocks), warps(warps), puts(puts) {
        layout.region_bytes = wire::align_up(u64{posters()} * puts * kPutBytes + kShift, wire::kPage);
        expect(posters() <= wire::kOfRanks, "a word for each poster");
    }
    u32 posters() const { return blocks * warps; }
    u64 word(u32 poster) const { return layout.bank_offset(kGeneration) + layout.word_in_bank(0, poster, 0); }
    u64 row(u32 poster, u32 put) const { return layout.region_offset(0) + (u64{poster} * puts + put) * kPutBytes; }
};

struct Args {
    const fabric::Peers* peers;
    Sizes sizes;
    u32 to;
};

inline u64 value(u32 poster, u32 put, u32 at) { return u64{poster} << 40 | u64{put} << 16 | at; }

// The interface that a fabric needs from an operation.
struct Waiter {
    template <class Ready>
    bool wait(wire::Phase phase, i32 peer, const u64* shown, u64 expected, Ready ready) {
        const WaitNote note{wire::phase_name(phase), peer, expected, shown};
        return spin_until(ready, cpu::kForever, &note);
    }
    bool wait_word(wire::Phase phase, i32 peer, const u64* word, u64 expected) {
        return wait(phase, peer, word, expected, [&] { return load_acquire<Scope::kSystem>(word) >= expected; });
    }
    template <class Ready>
    bool outlast(wire::Phase phase, i32 peer, const u64* shown, u64 expected, Ready ready) {
        return wait(phase, peer, shown, expected, ready);
    }
    bool masked(u32) { return false; }
};

DEEP_EP_KERNEL void send(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    const fabric::Peers& peers = *a.peers;
    const u32 poster = blockIdx.x * warps() + warp();
    fabric::Completion completion{};
    Waiter waiter;
    for (u32 put = 0; put < a.sizes.puts; ++put) {
        const u64 row = a.sizes.row(poster, put);
        for (u32 at = lane(); at < kPutBytes / sizeof(u64); at += kWarpSize) {
            reinterpret_cast<u64*>(peers.local + row)[at] = value(poster, put, at);
        }
        const fabric::Piece pieces[kPieces] = {{row, row + kShift, 32}, {row + 32, row + kShift + 32, kPutBytes - 32}};
        fabric::put_signal(peers, waiter, completion, a.to, pieces, kPieces, {a.sizes.word(poster), poster});
    }
    __syncthreads();
    // Its own puts are among those that the NIC has read by now: the rows may be overwritten.
    fabric::quiet(peers, waiter, completion);
    __syncthreads();
    for (u32 put = 0; put < a.sizes.puts; ++put) {
        for (u32 at = lane(); at < kPutBytes / sizeof(u64); at += kWarpSize) {
            reinterpret_cast<u64*>(peers.local + a.sizes.row(poster, put))[at] = 0;
        }
    }
}

struct Check {
    const u8* heap;
    const u8* bank;  // of its words
    Sizes sizes;
    u64* wrong;
};

DEEP_EP_KERNEL void receive(const void* args) {
    const Check& a = *static_cast<const Check*>(args);
    const u32 poster = blockIdx.x * warps() + warp();
    const auto* word = reinterpret_cast<const u64*>(a.bank + a.sizes.layout.word_in_bank(0, poster, 0));
    Waiter waiter;
    if (lane() == 0) waiter.wait_word(wire::Phase::kChunk, 0, word, a.sizes.puts * wire::kUnit);
    __syncwarp();
    for (u32 put = 0; put < a.sizes.puts; ++put) {
        for (u32 at = lane(); at < kPutBytes / sizeof(u64); at += kWarpSize) {
            const u64 got = reinterpret_cast<const u64*>(a.heap + a.sizes.row(poster, put) + kShift)[at];
            if (got != value(poster, put, at)) add_relaxed<Scope::kDevice>(a.wrong, 1);
        }
    }
}

void run(uint64_t seed, const char* fabric, u32 blocks, u32 warps, u32 puts, const nic::Options& options) {
    const Sizes sizes(blocks, warps, puts);
    const fabric::Route by_network = host::route_named(fabric);
    const TwoHeaps heaps(sizes.layout, options);
    u64 wrong = 0;
    std::atomic<bool> received{false};
    planted::run_world(2, seed, [&](int rank) {
        cpu::Executor& executor = cpu::Executor::get();
        host::CpuMemory host_memory;
        host::NetworkPlace place = heaps.place(rank, host_memory, kGeneration);
        const u8* const bank = heaps[rank] + sizes.layout.bank_offset(kGeneration);
        std::vector<fabric::Route> routes(2, by_network);
        routes[static_cast<size_t>(rank)] = fabric::kMapped;
        const host::Networks network(place, routes);
        if (rank == 1) {
            planted::launch("receive", 1, sizes.blocks, sizes.warps, receive, Check{heaps[1], bank, sizes, &wrong});
            executor.synchronize(1, 0);
            expect(wrong == 0, std::to_string(wrong) + " words are wrong");
            received = true;
            return;
        }
        u8* base[2] = {heaps[0], nullptr};
        fabric::Peers peers{};
        peers.ranks = 2;
        peers.local = heaps[0];
        peers.base = base;
        peers.route = routes.data();
        network.fill(peers);
        planted::launch("send", 0, sizes.blocks, sizes.warps, send, Args{&peers, sizes, 1});
        executor.synchronize(0, 0);
        // The receiver's part of the network is needed until everything has arrived.
        executor.wait([&] { return received.load(); }, "the receiver");
        const nic::Counters counted = network.counters()[1];
        const u64 puts_in_all = u64{sizes.posters()} * sizes.puts;
        const bool counts_adds = by_network == host::route_named("ibgda");
        expect(!counts_adds || counted.atomics == puts_in_all, "atomics: " + std::to_string(counted.atomics));
        expect(counted.bytes == puts_in_all * kPutBytes, "bytes: " + std::to_string(counted.bytes));
        expect(counted.doorbells <= puts_in_all, "doorbells: " + std::to_string(counted.doorbells));
        std::printf("%llu puts, %llu requests, %llu doorbells\n", puts_in_all, counted.atomics + counted.writes,
                    counted.doorbells);
    });
}

}  // namespace protocol::posters
