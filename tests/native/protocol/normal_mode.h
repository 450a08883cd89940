// Dispatch and combine through a Runtime, as called from Python, on ranks that are threads: every value is checked.
#pragma once

#include <set>

#include "ranks.h"

namespace protocol::normal_mode {

constexpr u32 kLaps = 3, kRecoveries = 3;

inline void lap(Buffer& buffer, u32 lap) {
    Batch batch(buffer, lap);
    auto call = batch.notify();
    batch.dispatch(*call);
    end_well(buffer, call);
    batch.check_dispatch();
    Output sums = batch.make_sums();
    end_well(buffer, batch.combine(buffer, batch.recv_x, sums));
    batch.check_echo(sums);
    sums.check(batch.whose());
    batch.end();
}

// Rank 0 aborts, during an operation or before it begins; the ranks continue.
inline void break_off(World& world, Buffer& buffer, u32 attempt) {
    buffer.meet(world);  // no rank aborts while a peer is still in an operation that has ended here
    const bool begins = attempt % 2 == 0;
    Batch batch(buffer, attempt);
    if (begins || buffer.rank != 0) {
        const auto call = batch.notify();
        if (buffer.rank == 0) buffer.runtime().abort(wire::kException);
        buffer.runtime().wait(*call);
        expect(begins || call->reason() == wire::kAborted, batch.whose() + "has not heard of it");
    } else {
        buffer.runtime().abort(wire::kException);
    }
    buffer.recover();
}

// A Buffer that has left refuses launches: its memory is about to go.
inline void leave(Buffer& buffer) {
    buffer.runtime().leave();
    bool refused = false;
    try {
        Batch(buffer, 0).notify();
    } catch (const std::logic_error&) {
        refused = true;
    }
    expect(refused, "it launches a kernel after it has left");
}

// Each queue pair to each peer has carried puts.
inline void check_queue_pairs(Buffer& buffer) {
    std::set<std::pair<int, u32>> used;
    for (const nic::Message& message : buffer.runtime().networks().trace()) {
        used.emplace(message.destination, message.queue);
    }
    expect(used.size() == (kRanks - 1) * buffer.setup.nic.queues_per_peer,
           "puts took " + std::to_string(used.size()) + " queue pairs");
}

// `recovers`: between laps, often enough that the initial bank of words is reused several times.
inline void run(uint64_t seed, const Setup& setup, bool recovers = false) {
    World world;
    planted::run_world(kRanks, seed, [&](int r) {
        Buffer buffer(world, static_cast<u32>(r), setup);
        for (u32 i = 0; i < (recovers ? kRecoveries + 1 : kLaps); ++i) {
            if (recovers && i != 0) break_off(world, buffer, i);
            lap(buffer, i);
        }
        buffer.meet(world);
        buffer.runtime().drain();
        if (setup.fabric == "ibgda") check_queue_pairs(buffer);
        buffer.meet(world);
        leave(buffer);
        buffer.meet(world);
    });
}

}  // namespace protocol::normal_mode
