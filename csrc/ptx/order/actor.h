// Who accesses memory, as the order of accesses knows it: a thread of a kernel, a host, a queue pair of a NIC.
#pragma once

#include "observe/observer.h"
#include "ptx/module.h"
#include "ptx/order/clock.h"

namespace deep_ep::ptx {

struct Actor {
    u32 number;         // among all that run
    u32 copies_number;  // of its bulk copies, which are an actor of their own
    u32 rank;           // whose GPU it is on: each rank has one of its own
    u64 launch;
    u64 block;  // among all blocks of all launches
    Clock clock;
    // What its bulk copies come after. They access memory through a proxy of their own, for which only a fence puts
    // other accesses in order, the thread's own too (PTX ISA, "Async proxy").
    Clock copies;

    Epoch now() const { return {number, clock.time_of(number)}; }
    Epoch copies_now() const { return {copies_number, copies.time_of(copies_number)}; }
    // What follows is no more covered by copies of the clock that were made before.
    void tick() { clock.set(number, clock.time_of(number) + 1); }
    void fence_copies() {
        copies.join(clock);
        tick();
    }
    // What a barrier that tells of their bytes hands on: they, and what they come after.
    void release_copies(Clock& barrier) {
        barrier.join(copies);
        copies.set(copies_number, copies.time_of(copies_number) + 1);
    }
    void release(Clock& barrier) {
        barrier.join(clock);
        tick();
    }
    // Those that have been made are waited for: what the thread does next comes after them.
    void complete_copies() {
        clock.set(copies_number, copies.time_of(copies_number));
        copies.set(copies_number, copies.time_of(copies_number) + 1);
    }
};

// An access that has been made.
struct Made {
    Epoch moment;
    u32 rank;
    u64 block;
    Scope scope;
    u64 address;
    u64 bytes;
    const Module* module;  // which outlives the order; null where no kernel has made it
    u32 place;             // in it
    observe::Kind kind;    // of who has made it, if no kernel has
};

// Whether an access's scope takes in the maker of another. Hosts and NICs are on no GPU.
inline bool takes_in(const Made& access, const Made& other) {
    switch (access.scope) {
        case Scope::kNone:
            return false;
        case Scope::kBlock:
            return access.block == other.block;
        case Scope::kDevice:
            return access.rank == other.rank && access.module != nullptr && other.module != nullptr;
        case Scope::kSystem:
            return true;
    }
    return false;
}

// Whether two accesses are strong, of the same bytes, and with scopes that each take in the other's actor: they may
// meet in any order (PTX ISA, "Moral Strength").
inline bool morally_strong(const Made& one, const Made& other) {
    return one.address == other.address && one.bytes == other.bytes && takes_in(one, other) && takes_in(other, one);
}

}  // namespace deep_ep::ptx
