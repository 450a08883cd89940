// An actor accesses memory: a thread of a kernel, a host, a proxy, or a queue pair of a NIC.
#pragma once

#include <algorithm>

#include "observe/observer.h"
#include "sim/ptx/module.h"
#include "sim/ptx/order/clock.h"

namespace deep_ep::ptx {

// Bulk copies of a thread are actors of their own, since each proceeds independently: loads, and the reads and writes
// of stores.
enum class Copies : u8 { kLoad, kRead, kWrite };
constexpr u32 kKindsOfCopies = 3;

// What bulk copies are ordered after: in their accesses to global memory, and in those to shared memory.
struct CopyClocks {
    Clock global, shared;

    void join(const CopyClocks& other) {
        global.join(other.global);
        shared.join(other.shared);
    }
    void set(u32 actor, u32 time) {
        global.set(actor, time);
        shared.set(actor, time);
    }
};

struct Actor {
    u32 number;  // among all running actors; its bulk copies have the next numbers
    u32 rank;    // the rank whose GPU it runs on: each rank has its own
    u64 launch;
    u64 block;  // among all blocks of all launches
    Clock clock;
    // What its bulk copies are ordered after. They access memory through the async proxy, for which only a proxy fence
    // orders other accesses, even the thread's own (PTX ISA, "Async proxy"). Stricter than PTX: a fence of another
    // thread does not count, even if this thread has since synchronized with it.
    CopyClocks copies;
    u32 issued[kKindsOfCopies] = {};
    // By the scope of the thread's last fence: what its later strong stores release (PTX ISA, "Release and Acquire
    // Patterns").
    Clock fenced[static_cast<u32>(Scope::kSystem) + 1] = {};

    Epoch now() const { return {number, clock.time_of(number)}; }
    // Starts a new moment: copies of the clock taken so far do not cover what follows.
    void tick() { clock.set(number, clock.time_of(number) + 1); }
    void fence(Scope scope) {
        fenced[static_cast<u32>(scope)] = clock;
        tick();
    }
    void fence_copies(bool of_global, bool of_shared) {
        if (of_global) copies.global.join(clock);
        if (of_shared) copies.shared.join(clock);
        tick();
    }
    void release(Clock& barrier) {
        barrier.join(clock);
        tick();
    }
    u32 number_of(Copies kind) const { return number + 1 + static_cast<u32>(kind); }
    // A copy is ordered after `copies`, and not after other copies that the thread has not waited for.
    Epoch issue(Copies kind) { return {number_of(kind), ++issued[static_cast<u32>(kind)]}; }
    // The thread has waited for a copy: its later accesses and copies are ordered after it.
    void complete(const Epoch& copy) {
        clock.set(copy.actor, std::max(copy.time, clock.time_of(copy.actor)));
        for (Clock* const one : {&copies.global, &copies.shared}) {
            one->set(copy.actor, std::max(copy.time, one->time_of(copy.actor)));
        }
    }
};

// A recorded access.
struct Made {
    Epoch moment;
    u32 rank;
    u64 block;
    Scope scope;
    u64 address;
    u64 bytes;
    const Module* module;  // outlives the Order; null if the access was not made by a kernel
    u32 place;             // in the module
    observe::Kind kind;    // of the accessor, if it is not a kernel
};

// Whether the scope of an access includes the actor of another. Hosts and NICs are on no GPU.
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

// Whether two accesses are strong, to the same bytes, and have scopes that include each other's actor. Such accesses
// need no order between them (PTX ISA, "Moral Strength").
inline bool morally_strong(const Made& one, const Made& other) {
    return one.address == other.address && one.bytes == other.bytes && takes_in(one, other) && takes_in(other, one);
}

}  // namespace deep_ep::ptx
