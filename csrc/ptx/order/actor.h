// A thread as the order of memory accesses knows it.
#pragma once

#include "ptx/module.h"
#include "ptx/order/clock.h"

namespace deep_ep::ptx {

struct Actor {
    u32 number;  // among all that run
    u32 rank;    // whose GPU it is on: each rank has one of its own
    u64 launch;
    u64 block;  // among all blocks of all launches
    Clock clock;

    Epoch now() const { return {number, clock.time_of(number)}; }
    // What follows is no more covered by copies of the clock that were made before.
    void tick() { clock.set(number, clock.time_of(number) + 1); }
};

// An access that has been made.
struct Made {
    Epoch moment;
    u32 rank;
    u64 block;
    Scope scope;
    const Module* module;  // which outlives the order
    u32 place;             // in it
};

inline bool takes_in(Scope scope, u32 rank, u64 block, u32 other_rank, u64 other_block) {
    switch (scope) {
        case Scope::kNone:
            return false;
        case Scope::kBlock:
            return block == other_block;
        case Scope::kDevice:
            return rank == other_rank;
        case Scope::kSystem:
            return true;
    }
    return false;
}

// Whether two strong accesses' scopes each take in the other's actor.
inline bool inclusive(const Made& one, const Made& other) {
    return takes_in(one.scope, one.rank, one.block, other.rank, other.block) &&
           takes_in(other.scope, other.rank, other.block, one.rank, one.block);
}

}  // namespace deep_ep::ptx
