#include "sharing.h"

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "../program.h"
#include "draw.h"
#include "fabric/fabric.h"
#include "guest.h"
#include "two_heaps.h"

namespace protocol::sharing {

using planted::expect;

constexpr u32 kBlocks = 2, kWarps = 4, kPosters = kBlocks * kWarps, kPuts = 9;
constexpr u32 kPutBytes = 96, kFirstBytes = 32, kGeneration = 1, kMaxPatience = 60;

struct Sizes {
    wire::HeapLayout layout{2, 1, 0, 0};

    Sizes() {
        layout.region_bytes = wire::align_up(u64{kPosters} * (kPuts + 1) * kPutBytes, wire::kPage);
        static_assert(kPosters <= wire::kOfRanks, "a word for each poster");
    }
    u64 word(u32 poster) const { return layout.bank_offset(kGeneration) + layout.word_in_bank(0, poster, 0); }
    u64 row(u32 poster, u32 put) const { return layout.region_offset(0) + (poster * (kPuts + 1) + put) * kPutBytes; }
};

// Both kinds post on each of two queue pairs.
bool is_guest(u32 poster) { return poster / 2 % 2 != 0; }
// Requests of a guest's put. The last one is an add, without which the put would not be visible.
u32 requests(u32 poster, u32 put) { return 1 + (poster + put) % 3; }
u64 value(u32 poster, u32 put, u32 at) { return u64{poster} << 40 | u64{put} << 16 | at; }

struct Args {
    const fabric::Peers* peers;
    const fabric::Ibgda* net;
    Sizes sizes;
    u64 seed;
    u32 batch;
    bool gives_up;
    u32* told;    // that our threads must give up
    u32* posted;  // [posters] puts
};

// The interface that a fabric needs from an operation, one that some thread eventually gives up.
struct Waiter {
    u32* told;
    u32 patience;  // polls; 0: unlimited

    template <class Ready>
    bool wait(wire::Phase phase, i32 peer, const u64* shown, u64 expected, Ready ready) {
        // Relaxed, like the store below: it publishes nothing, the others only learn that they may leave.
        const auto is_told = [&] { return load_relaxed<Scope::kDevice>(told) != 0; };
        if (is_told()) return false;
        const WaitNote note{wire::phase_name(phase), peer, expected, shown};
        bool arrived = false;
        spin_until([&] { return (arrived = ready()) || is_told() || (patience != 0 && --patience == 0); },
                   cpu::kForever, &note);
        if (!arrived) store_relaxed<Scope::kDevice>(told, 1u);
        return arrived;
    }
    bool wait_word(wire::Phase, i32, const u64*, u64) { return true; }
    template <class Ready>
    bool outlast(wire::Phase phase, i32 peer, const u64* shown, u64 expected, Ready ready) {
        const WaitNote note{wire::phase_name(phase), peer, expected, shown};
        return spin_until(ready, cpu::kForever, &note);
    }
    bool masked(u32) { return false; }
};

void write_row(const Args& a, u32 poster, u32 put) {
    auto* const words = reinterpret_cast<u64*>(a.peers->local + a.sizes.row(poster, put));
    for (u32 at = lane(); at < kPutBytes / sizeof(u64); at += kWarpSize) words[at] = value(poster, put, at);
}

// Called by a warp.
template <class AnyWaiter>
bool post(const Args& a, AnyWaiter& waiter, u32 poster, u32 put) {
    write_row(a, poster, put);
    const u64 row = a.sizes.row(poster, put), rest = row + kFirstBytes;
    const fabric::Piece pieces[] = {{row, row, kFirstBytes}, {rest, rest, kPutBytes - kFirstBytes}};
    fabric::Completion completion{};
    return fabric::put_signal(*a.peers, waiter, completion, 1, pieces, 2, {a.sizes.word(poster), poster});
}

const fabric::QueuePair& queue_of(const Args& a, u32 poster) {
    return a.net->queue_pairs[a.net->per_peer + poster % a.net->per_peer];
}

// Called by one thread once its warp has written the row: reserves WQEBBs and writes them.
struct Span {
    u64 begin, end;
};
Span write_as_guest(const Args& a, Guest& guest, u32 poster, u32 put) {
    const u32 count = requests(poster, put);
    const u64 row = a.sizes.row(poster, put), begin = guest.take(count);
    if (count == 2) guest.write(begin, row, row, kPutBytes);
    if (count == 3) {
        guest.write(begin, row, row, kFirstBytes);
        guest.write(begin + 1, row + kFirstBytes, row + kFirstBytes, kPutBytes - kFirstBytes);
    }
    guest.add(begin + count - 1, a.sizes.word(poster));
    return {begin, begin + count};
}

// Called by a warp.
void post_as_guest(const Args& a, u32 poster, u32 put) {
    write_row(a, poster, put);
    __syncwarp();
    if (lane() != 0) return;
    Guest guest(*a.net, queue_of(a, poster), a.batch);
    const Span taken = write_as_guest(a, guest, poster, put);
    guest.publish(taken.begin, taken.end);
}

DEEP_EP_KERNEL void send(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    const u32 poster = blockIdx.x * warps() + warp();
    Waiter waiter{a.told, a.gives_up ? 1 + Draw(a.seed * kPosters + poster).below(kMaxPatience) : 0};
    u32 put = 0;
    if (is_guest(poster)) {
        for (; put < kPuts; ++put) post_as_guest(a, poster, put);
    } else {
        while (put < kPuts && post(a, waiter, poster, put)) ++put;
    }
    if (lane() == 0) a.posted[poster] = put;
    __syncthreads();
    fabric::Completion completion{};
    if (!a.gives_up) fabric::quiet(*a.peers, waiter, completion);
}

// The interface that a fabric needs from an operation in which others reserve WQEBBs between a thread's own and its
// turn.
struct Overtaken {
    std::function<void()> behind;

    template <class Ready>
    bool wait(wire::Phase, i32, const u64*, u64, Ready ready) {
        return ready();
    }
    bool wait_word(wire::Phase, i32, const u64*, u64) { return true; }
    template <class Ready>
    bool outlast(wire::Phase, i32, const u64*, u64, Ready ready) {
        behind();
        return ready();
    }
    bool masked(u32) { return false; }
};

constexpr u32 kOvertaken = 2;  // puts

// The last of its puts follows more than a quarter of the ring for which no thread has rung.
DEEP_EP_KERNEL void leave_doorbells(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    if (blockIdx.x != 0 || warp() != 0) return;
    constexpr u32 kOurs = 0, kGuest = 2;
    const fabric::QueuePair& queue = queue_of(a, kOurs);
    Guest guest(*a.net, queue, a.batch);
    for (u32 put = 0; put < kOvertaken; ++put) {
        write_row(a, kGuest, put);
        Span behind{};
        Overtaken waiter{[&] { behind = write_as_guest(a, guest, kGuest, put); }};
        const bool posted = post(a, waiter, kOurs, put);
        if (lane() != 0) continue;
        const u64 rung = put + 1 == kOvertaken ? behind.begin : 0;
        // Relaxed: at that moment only this thread posts here.
        const bool right = posted && load_relaxed<Scope::kDevice>(queue.rung) == rung;
        if (right && a.posted[kOurs] == put) a.posted[kOurs] = a.posted[kGuest] = put + 1;
        guest.fill(behind.begin, behind.end);
    }
}

// Also runs if our threads have given up.
DEEP_EP_KERNEL void send_more(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    const u32 poster = blockIdx.x * warps() + warp();
    if (!is_guest(poster)) return;
    post_as_guest(a, poster, a.posted[poster]);
    if (lane() != 0) return;
    a.posted[poster] += 1;
    Guest(*a.net, queue_of(a, poster), a.batch).quiet();
}

struct Check {
    const u8* heap;
    Sizes sizes;
    const u32* posted;
    u64* wrong;
};

// Everything has arrived by now.
DEEP_EP_KERNEL void receive(const void* args) {
    const Check& a = *static_cast<const Check*>(args);
    const u32 poster = blockIdx.x * warps() + warp(), posted = a.posted[poster];
    // Acquire: pairs with the NIC's add, after the rows that it has placed. `wrong` is read once the kernel has ended.
    const u64 word = load_acquire<Scope::kSystem>(reinterpret_cast<const u64*>(a.heap + a.sizes.word(poster)));
    if (word != posted * wire::kUnit) add_relaxed<Scope::kDevice>(a.wrong, 1);
    for (u32 put = 0; put < posted; ++put) {
        if (is_guest(poster) && requests(poster, put) == 1) continue;
        for (u32 at = lane(); at < kPutBytes / sizeof(u64); at += kWarpSize) {
            const u64 got = reinterpret_cast<const u64*>(a.heap + a.sizes.row(poster, put))[at];
            if (got != value(poster, put, at)) add_relaxed<Scope::kDevice>(a.wrong, 1);
        }
    }
}

// Everything reserved has been made valid, announced to the NIC and completed.
void expect_equal_counts(const fabric::Ibgda& net) {
    for (u32 i = 0; i < net.per_peer; ++i) {
        const fabric::QueuePair& queue = net.queue_pairs[net.per_peer + i];
        const u64 reserved = *queue.reserved;
        expect(*queue.filled == reserved && *queue.rung == reserved && *queue.completed == reserved,
               std::to_string(reserved) + " blocks taken, " + std::to_string(*queue.filled) + " filled, " +
                   std::to_string(*queue.rung) + " rung, " + std::to_string(*queue.completed) + " completed");
        expect(*queue.ringing == 0, "the lock is taken");
    }
}

// Rank 0 launches `kernels`, one after the other; then rank 1 checks what has arrived. Returns the puts of each poster.
std::vector<u32> run_kernels(Args args, const nic::Options& options, const std::vector<cpu::Entry>& kernels) {
    const Sizes sizes;
    const TwoHeaps heaps(sizes.layout, options);
    const fabric::Route by_network = host::route_named("ibgda");
    std::vector<u32> posted(kPosters, 0);
    u64 wrong = 0;
    // Each orders the first rank's work before the second's, which waits for it: posts and counts, then checks.
    std::atomic<bool> sent{false}, received{false};
    planted::run_world(2, args.seed, [&](int rank) {
        cpu::Executor& executor = cpu::Executor::get();
        host::CpuMemory memory;
        std::vector<fabric::Route> routes(2, by_network);
        routes[static_cast<size_t>(rank)] = fabric::kMapped;
        const host::Networks network(heaps.place(rank, memory, kGeneration), routes);
        if (rank == 1) {
            executor.wait([&] { return sent.load(); }, "the sender");
            planted::launch("receive", 1, kBlocks, kWarps, receive, Check{heaps[1], sizes, posted.data(), &wrong});
            executor.synchronize(1, 0);
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
        const auto& net = *static_cast<const fabric::Ibgda*>(peers.states[by_network]);
        args.peers = &peers;
        args.net = &net;
        args.posted = posted.data();
        for (const cpu::Entry kernel : kernels) {
            planted::launch("send", 0, kBlocks, kWarps, kernel, args);
            executor.synchronize(0, 0);
        }
        expect_equal_counts(net);
        sent = true;
        executor.wait([&] { return received.load(); }, "the receiver");
    });
    expect(wrong == 0, std::to_string(wrong) + " words are wrong");
    return posted;
}

void run(uint64_t seed, u32 batch, bool gives_up, const nic::Options& options) {
    u32 told = 0, puts = 0;
    const std::vector<u32> posted =
        run_kernels({nullptr, nullptr, {}, seed, batch, gives_up, &told, nullptr}, options, {send, send_more});
    for (u32 poster = 0; poster < kPosters; ++poster) {
        expect(gives_up || posted[poster] == kPuts + is_guest(poster), "a put was not posted");
        puts += posted[poster];
    }
    std::printf("%u puts, told to give up: %u\n", puts, told);
}

void run_left(uint64_t seed, const nic::Options& options) {
    const std::vector<u32> posted =
        run_kernels({nullptr, nullptr, {}, seed, 1, false, nullptr, nullptr}, options, {leave_doorbells, send_more});
    expect(posted[0] == kOvertaken, "a thread rang too early, or too late");
}

}  // namespace protocol::sharing
