// Low-latency calls in which one rank is masked at some point and detects it; the others continue (P17). It delays its
// next call for a long time, or another rank's caller masks it, or its messages are lost from some request on. Each
// trip has a different layout from the previous one.
#pragma once

#include "draw.h"
#include "low_latency.h"

namespace protocol::masks {

using namespace low_latency_mode;

constexpr u32 kTrips = 8, kSteps = 4;

enum class How : u32 { kSleeps, kByCaller, kSilent };

inline void sleep(u64 nanoseconds) {
    cpu::Executor& executor = cpu::Executor::get();
    executor.wait([] { return false; }, "a sleep", executor.now_ns() + nanoseconds);
}

inline void run(uint64_t seed, Setup setup) {
    make_room(setup);
    setup.masks_ranks = true;
    Draw draw(seed);
    const bool by_nic = setup.fabric == "ibgda" || setup.fabric == "mixed";
    const auto how = static_cast<How>(draw.below(by_nic ? 3 : 2));
    // Its messages to one rank are lost before those to another: of two ranks that then wait for each other, the lower
    // one masks.
    const u32 lost = how == How::kSilent ? kRanks - 1 : draw.below(kRanks), other = (lost + 1) % kRanks;
    const u32 moment = draw.below(kTrips * kSteps), late_moment = draw.below(kTrips * kSteps);
    if (how == How::kSilent) {
        setup.nic.fault_rank = static_cast<int>(lost);
        setup.nic.fault_after = draw.below(3 * kTrips);
    }
    World world;
    planted::run_world(kRanks, seed, [&](int r) {
        const u32 rank = static_cast<u32>(r);
        Buffer buffer(world, rank, setup);
        u32 step = 0;
        bool failed = false;
        const auto turn = [&](const Trip& trip) {
            if (step == late_moment && rank == other) sleep(kSecond / 2);  // shorter than the timeout of waits
            if (step++ == moment) {
                if (how == How::kSleeps && rank == lost) sleep(20 * kSecond);
                if (how == How::kByCaller && rank == other) {
                    expect(buffer.runtime().mask(static_cast<int>(lost)), "masks none");
                }
            }
            failed = failed || trip.failed();
        };
        for (u32 number = 0; number < kTrips && !failed; ++number) {
            const Case& of = *std::array{&kUnits, &kCast, &kPuts, &kLog}[number % 4];
            const bool whole = number / 2 % 2 == 0;
            Trip trip(buffer, of, number, lost);
            turn(trip);
            trip.dispatch(whole);
            turn(trip);
            if (!whole) trip.receive();
            turn(trip);
            trip.combine(whole, false);
            turn(trip);
            if (!whole) trip.receive_sums();
            trip.end();
            failed = failed || trip.failed();
        }
        const wire::RankMask masked = buffer.runtime().masked();
        for (u32 r = 0; r < kRanks; ++r) {
            expect(rank == lost || r == lost || !masked.has(r), "a rank that has answered is masked");
        }
        const bool needed = moment + kSteps < kTrips * kSteps;  // by the other ranks, after that
        expect(rank == lost || how != How::kSleeps || !needed || masked.has(lost), "the lost rank is not masked");
        // Other ranks do not wait for its last calls.
        const bool late = moment + (how == How::kSleeps ? 1 : 2 * kSteps) >= kTrips * kSteps;
        expect(rank != lost || failed || how == How::kSilent || late, "the lost rank did not detect that it is masked");
        buffer.meet(world);
        buffer.runtime().drain();
        buffer.meet(world);
    });
}

}  // namespace protocol::masks
