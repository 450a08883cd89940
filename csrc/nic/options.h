// How the software NIC misbehaves, within what a network may do.
#pragma once

#include "wire/mlx5.h"

namespace deep_ep::nic {

struct Options {
    u32 blocks = 256;          // of each send queue's ring; a power of two
    u32 queues_per_peer = 1;   // queue pairs
    u32 nics = 1;              // of a rank; the queue pairs take turns
    u32 chunk_log2 = 30;       // bytes under one key
    u64 key_offset = 0;        // of them, under the first key, before the heap
    u64 max_bytes = 1u << 20;  // of one request
    u32 mtu = 4096;            // bytes that are placed at once
    u32 in_flight = 4;         // requests of a queue pair that are under way at once
    u32 max_delay = 0;         // turns of others before each step
    bool relaxed = false;      // data may pass data on a queue pair; an atomic passes nothing
    bool traced = false;       // every request is kept

    // From its `fault_after`-th request on, the queue pair from `fault_rank` to `fault_peer` (-1: every one) fails with
    // `fault_syndrome`; without one it is silent, as if the peer were gone and retries had no end.
    int fault_rank = -1;
    int fault_peer = -1;
    u64 fault_after = 0;
    u32 fault_syndrome = 0;
};

struct Counters {
    u64 writes = 0;     // requests
    u64 atomics = 0;    // requests; one for each put
    u64 bytes = 0;      // of payload
    u64 doorbells = 0;  // as kernels count them

    Counters& operator+=(const Counters& other) {
        writes += other.writes;
        atomics += other.atomics;
        bytes += other.bytes;
        doorbells += other.doorbells;
        return *this;
    }
};

// One request, for the trace.
struct Message {
    u64 time_ns;
    int source;
    int destination;
    u32 queue;
    u32 opcode;
    u32 bytes;
};

}  // namespace deep_ep::nic
