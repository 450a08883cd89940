// What outlives a call (Context) and what belongs to one call (Ticket). Both in device memory.
#pragma once

#include "fabric/peers.h"
#include "wire/outcome.h"

namespace deep_ep {

using device::Scope;

// One per Buffer. Kernels read it through a pointer, so that captured graphs see what changes (P16).
struct Context {
    fabric::Peers peers;
    u64 operation;  // number of the next operation (P1)
    u64* base;      // [heap.words()] what earlier uses have consumed of each of this rank's signal words (P7)
    fabric::Completion* farewell;  // puts that nobody waits for within their operation: the `free` words; host-visible
    u32 generation;                // grows with each recovery
    u64 mask;                      // a bit for each rank that is neither sent to nor waited for (P17)
};

// Points at which the last block of a kernel goes on alone.
enum Meeting : u32 { kCounted, kStored, kFinished, kMeetings };

// One per call, or per call of a captured graph. The operation's first kernel leaves the number here, the later ones
// read it (P1). An operation that ends well leaves it fit for the next.
struct Ticket {
    u64 operation;
    u64 use;        // how often its region has been used before: operation / regions
    u64 arguments;  // hash of what all ranks must agree on; messages carry it
    u32 region;     // operation % regions; both kept, a 64-bit division is long on a GPU
    fabric::Completion completion;
    u32 failed;                 // some block of this call has given up: its other blocks need not wait on
    u32 claimed;                // the first thread to give up writes the record
    u32 blocks_met[kMeetings];  // last-block counters
};

// What every kernel of an operation gets.
struct CallArgs {
    Context* context;
    Ticket* ticket;
    wire::Outcome* outcome;  // host-visible
    u64 timeout_ns;          // of each wait
};

}  // namespace deep_ep
