// Dispatches that are begun now and finished later. All ranks begin them in the same order and finish them in the same
// order, but each interleaves its begins and finishes as it likes (P1).
#pragma once

#include "ranks.h"

namespace protocol::apart {

constexpr u32 kPairs = 3;

inline void finish(Buffer& buffer, Batch& batch, const std::shared_ptr<host::Call>& call) {
    expect(batch.dispatch(*call), batch.whose() + "the dispatch failed before there were counts");
    end_well(buffer, call);
    batch.check_dispatch();
    batch.check_guards();
}

inline void run(uint64_t seed, const Setup& setup) {
    World world;
    planted::run_world(kRanks, seed, [&](int r) {
        Buffer buffer(world, static_cast<u32>(r), setup);
        for (u32 pair = 0; pair < kPairs; ++pair) {
            Batch first(buffer, 2 * pair), second(buffer, 2 * pair + 1);
            const auto one = first.notify(true);
            if (static_cast<u32>(r) % 2 == pair % 2) {
                const auto other = second.notify(true);
                finish(buffer, first, one);
                finish(buffer, second, other);
            } else {
                finish(buffer, first, one);
                finish(buffer, second, second.notify(true));
            }
            first.end();
            second.end();
        }
        buffer.meet(world);
        buffer.runtime().drain();
        buffer.meet(world);
    });
}

}  // namespace protocol::apart
