// An agent that accesses memory: a thread of a kernel, a host, a proxy, or a queue pair of a NIC.
#pragma once

#include <algorithm>

#include "observe/observer.h"
#include "ptx/module.h"
#include "ptx/order/clock.h"

namespace deep_ep::ptx {

// Bulk copies of a thread, as actors of their own: loads, and stores' reading and writing. Each goes on by itself.
enum class Copies : u8 { kLoad, kRead, kWrite };
constexpr u32 kKindsOfCopies = 3;

struct Actor {
    u32 number;  // among all that run; its copies have the next ones
    u32 rank;    // whose GPU it is on: each rank has one of its own
    u64 launch;
    u64 block;  // among all blocks of all launches
    Clock clock;
    // What its bulk copies come after. They access memory through a proxy of their own, for which only a fence puts
    // other accesses in order, the thread's own too (PTX ISA, "Async proxy"). Stricter than PTX: a fence of another
    // thread does not count, though this one has met it since.
    Clock copies;
    u32 issued[kKindsOfCopies] = {};

    Epoch now() const { return {number, clock.time_of(number)}; }
    // What follows is no more covered by copies of the clock that were made before.
    void tick() { clock.set(number, clock.time_of(number) + 1); }
    void fence_copies() {
        copies.join(clock);
        tick();
    }
    void release(Clock& barrier) {
        barrier.join(clock);
        tick();
    }
    u32 number_of(Copies kind) const { return number + 1 + static_cast<u32>(kind); }
    // A copy comes after what the clock of copies says, and after no other that has not been waited for.
    Epoch issue(Copies kind) { return {number_of(kind), ++issued[static_cast<u32>(kind)]}; }
    // One that has been waited for: what the thread does next comes after it, and its next copies do.
    void complete(const Epoch& copy) {
        clock.set(copy.actor, std::max(copy.time, clock.time_of(copy.actor)));
        copies.set(copy.actor, std::max(copy.time, copies.time_of(copy.actor)));
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
    observe::Kind kind;    // of the agent that has made it, where no kernel has
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
