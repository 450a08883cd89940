#include "quiet.h"

#include <string>
#include <vector>

#include "../program.h"
#include "fabric/fabric.h"
#include "host/network/networks.h"

namespace protocol::quiet {

using namespace deep_ep;
using namespace deep_ep::device;
using planted::expect;
namespace mlx5 = wire::mlx5;

constexpr u32 kPosted = 3, kNoThread = ~0u;

// As left by threads that found others after them, which come no further.
struct Counts {
    u64 reserved = kPosted + 1, filled = kPosted, rung = 0, completed = 0, rings = 0;
    u32 ringing = 0, record = 0;
    u64 doorbell = 0;
};

// Memory that the threads of one kernel share: which of them waited for a queue pair, and the answer that each got.
struct Record {
    std::vector<fabric::QueuePair> queue_pairs;
    std::vector<Counts> counts;
    std::vector<mlx5::Cqe> completions;
    std::vector<u32> waited_by;  // [queue pairs]
    std::vector<u32> gone_on;    // [threads]
    u32 silent;                  // the queue pair whose NIC does not answer
};

// The interface that a fabric needs from an operation. The NIC answers each thread that waits for it, once notified.
struct Waiter {
    Record& record;

    template <class Ready>
    bool wait(wire::Phase, i32, const u64* shown, u64, Ready ready) {
        for (u32 i = 0; i < record.queue_pairs.size(); ++i) {
            if (&record.counts[i].completed != shown) continue;
            record.waited_by[i] = threadIdx.x;
            if (i == record.silent || record.counts[i].record != mlx5::send_counter(kPosted)) return false;
            store_release<Scope::kSystem>(&record.completions[i].tail, mlx5::cqe_tail(kPosted - 1, mlx5::kRequestDone));
        }
        return ready();
    }
    bool wait_word(wire::Phase, i32, const u64*, u64) { return true; }
    bool masked(u32) { return false; }
};

struct Args {
    const fabric::Peers* peers;
    Record* record;
};

DEEP_EP_KERNEL void leave(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    fabric::Completion completion{};
    Waiter waiter{*a.record};
    a.record->gone_on[threadIdx.x] = fabric::quiet(*a.peers, waiter, completion);
    __syncthreads();
}

void run(uint64_t seed, u32 ranks, u32 per_peer, u32 warps) {
    const u32 count = ranks * per_peer, threads = warps * kWarpSize;
    Record record;
    record.queue_pairs.resize(count);
    record.counts.resize(count);
    record.completions.assign(count, mlx5::Cqe{});
    record.waited_by.assign(count, kNoThread);
    record.gone_on.assign(threads, kNoThread);
    record.silent = count / 2;
    for (u32 i = 0; i < count; ++i) {
        record.completions[i].tail = ~0u;
        fabric::QueuePair& qp = record.queue_pairs[i];
        qp.cqe = &record.completions[i];
        qp.peer = i / per_peer;
        qp.blocks = 8;
        Counts& counts = record.counts[i];
        qp.reserved = &counts.reserved;
        qp.filled = &counts.filled;
        qp.rung = &counts.rung;
        qp.completed = &counts.completed;
        qp.ringing = &counts.ringing;
        qp.rings = &counts.rings;
        qp.record = &counts.record;
        qp.doorbell = &counts.doorbell;
    }
    fabric::Ibgda net{};
    net.queue_pairs = record.queue_pairs.data();
    net.per_peer = per_peer;
    fabric::Peers peers{};
    peers.ranks = ranks;
    peers.states[host::route_named("ibgda")] = &net;
    planted::run_world(1, seed, [&](int) {
        planted::launch("leave", 0, 1, warps, leave, Args{&peers, &record});
        cpu::Executor::get().synchronize(0, 0);
    });
    for (u32 i = 0; i < count; ++i) {
        // Queue pairs after the silent one in its thread's share are not waited for.
        const bool reached = i % threads != record.silent % threads || i <= record.silent;
        const u32 expected = reached ? i % threads : kNoThread;
        expect(record.waited_by[i] == expected, "queue pair " + std::to_string(i) + " was waited for by thread " +
                                                    std::to_string(static_cast<i32>(record.waited_by[i])));
    }
    for (u32 thread = 0; thread < threads; ++thread) {
        expect(record.gone_on[thread] == (thread != record.silent % threads),
               "thread " + std::to_string(thread) + " was told " + std::to_string(record.gone_on[thread]));
    }
}

}  // namespace protocol::quiet
