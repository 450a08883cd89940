// How the software NIC reorders, delays and fails, within what a network may do.
#pragma once

#include "wire/mlx5.h"

namespace deep_ep::nic {

struct Options {
    u32 blocks = 256;          // WQEBBs per send queue; a power of two
    u32 queues_per_peer = 1;   // queue pairs per peer
    u32 nics = 1;              // NICs per rank; the queue pairs are assigned round-robin
    u32 chunk_log2 = 30;       // log2 of the bytes under one key
    u64 key_offset = 0;        // bytes under the first key that precede the heap
    u64 max_bytes = 1u << 20;  // per request
    u32 mtu = 4096;            // bytes that are placed at once
    u32 in_flight = 4;         // requests of a queue pair in progress at once
    u32 max_delay = 0;         // turns of other fibers before each step
    bool relaxed = false;      // data may pass data on a queue pair
    // An atomic may pass data, as one of PCIe passes relaxed writes. No such memory is used (P8).
    bool atomics_pass = false;
    bool traced = false;  // every request is recorded

    // After `fault_after` requests, the queue pair from `fault_rank` to `fault_peer` (-1: to every peer) fails with
    // `fault_syndrome`. If that is 0 it becomes silent, as if the peer had died and retries never ended.
    int fault_rank = -1;
    int fault_peer = -1;
    u64 fault_after = 0;
    u32 fault_syndrome = 0;
    bool fault_flushes = false;  // the requests behind it are flushed: their report takes the place of the error's
};

struct Counters {
    u64 writes = 0;     // write requests
    u64 atomics = 0;    // atomic requests; one for each put
    u64 bytes = 0;      // payload bytes
    u64 doorbells = 0;  // as counted by kernels

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
