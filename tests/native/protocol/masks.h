// Low-latency calls of which one rank, at some point, does not make the next for long: the others mask it and go on,
// and it finds that out (P17). Each trip has another layout than the one before.
#pragma once

#include "draw.h"
#include "low_latency.h"

namespace protocol::masks {

using namespace low_latency_mode;

constexpr u32 kTrips = 8, kSteps = 4;

inline void sleep_long(const Buffer&) {
    cpu::Executor& executor = cpu::Executor::get();
    executor.wait([] { return false; }, "a sleep", executor.now_ns() + 20 * kSecond);
}

inline void run(uint64_t seed, Setup setup) {
    make_room(setup);
    setup.masks_ranks = true;
    Draw draw(seed);
    const u32 lost = draw.below(kRanks), moment = draw.below(kTrips * kSteps);
    World world;
    planted::run_world(kRanks, seed, [&](int r) {
        const u32 rank = static_cast<u32>(r);
        Buffer buffer(world, rank, setup);
        u32 step = 0;
        bool failed = false;
        const auto turn = [&](const Trip& trip) {
            if (step++ == moment && rank == lost) sleep_long(buffer);
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
        for (u32 other = 0; other < kRanks; ++other) {
            expect(rank == lost || other == lost || !masked.has(other), "a rank that has answered is masked");
        }
        // Before the last step all wait for it once more.
        expect(rank != lost || failed || moment == kTrips * kSteps - 1,
               "the lost rank has not found that it is masked");
        buffer.meet(world);
        buffer.runtime().drain();
        buffer.meet(world);
    });
}

}  // namespace protocol::masks
