// What this library reads of NVSHMEM's state for kernels: its queue pairs for IBGDA, its keys, where its heaps are.
// Only the fields that are read have names, and ours; scripts/nvshmem_layouts.py asks the compiler where they lie in
// NVSHMEM's own headers, and tests/network/test_nvshmem_tables.py compares what it found (tests/data/nvshmem) with
// these tables.
//
// NVSHMEM's host library copies the two states to the device symbols of every module that is registered with it
// (nvshmemx_cumodule_init), so its version decides what is in them, never that of a header. Within major version 3 the
// states only grow: the device state has 776 bytes up to 3.6, 816 in 3.7 and 848 in 3.8, the IBGDA state always 8384,
// with fields where there was padding. Up to 3.6 the host library copies as many bytes as its own state has; from 3.7
// on it asks how many the symbol has. A symbol of 776 bytes is therefore right for all, and what lies behind them is
// never read. The one difference in meaning is which queue pair is where in the table (kTableByQueueSince).
//
// All pointers are addresses in device memory, which the host reads by copies; so here they are integers.
#pragma once

#include "wire/types.h"

namespace deep_ep::wire::nvshmem {

// Versions of the host library, in the order of their releases.
constexpr u32 version(u32 major, u32 minor, u32 patch) { return major << 20 | minor << 10 | patch; }
constexpr u32 kMajor = 3;
// The oldest whose tables are known. Later ones of the same major version are taken to be like the newest that is
// known: NVSHMEM keeps what modules compiled for an older version read. Which queue pair is where it has changed once
// all the same, so a reader of the table checks that no queue pair leads to itself.
constexpr u32 kOldest = version(3, 4, 5);
// Before: queue_pairs[(pe * rcs_per_pe + queue) * nics + nic]. Since then:
// queue_pairs[(nic * default_rcs_per_pe + queue) * pes + pe], and behind these what nvshmemx_qp_create has added, the
// same way; its handles are the indexes of those to PE 0.
constexpr u32 kTableByQueueSince = version(3, 5, 0);
// With several NICs for a PE, the queue pairs of the second take the places of those of the first, until this version.
constexpr u32 kSeveralNicsSince = version(3, 7, 0);
// Fields that came later. The padding in their place says nothing.
constexpr u32 kDefaultRcsSince = version(3, 5, 0);
constexpr u32 kTransportSince = version(3, 6, 0);

enum Transport : u32 { kProxy = 0, kIbgda = 1, kGpuNetIo = 2 };
enum QueuePairKind : u32 { kDci = 1, kDct = 2, kRc = 3 };
constexpr u32 kNoNumber = ~0u;  // of a queue pair that does not exist, such as that of a PE to itself
// A queue pair's lock (posting): kernels go from kUnlocked to kLocked by compare-and-swap.
enum Lock : u32 { kUnlocked = 0, kLocked = 1 };

// nvshmemx_init_status. From kInitialized on there is a device, and a module can be registered.
enum InitStatus : u32 { kNotInitialized = 0, kBootstrapped = 1, kInitialized = 2, kLimitedMpg = 3, kFullMpg = 4 };

constexpr u32 kMaxNics = 15;        // of a PE
constexpr u32 kKeysInState = 64;    // of each kind; the others are in a table of their own
constexpr u32 kMaxBlocks = 32768;   // of a ring: NVSHMEM_QP_DEPTH
constexpr u32 kSlotBytes = 256;     // of QueuePair::returned; the first slot takes what is never read
constexpr u64 kMaxBytes = 1 << 30;  // of a request

// nvshmemi_device_state_d
struct DeviceState {
    u32 unread;
    u32 pe;
    u32 pes;
    u32 unread_behind_pes[7];
    u64 heap;  // of this PE, as its kernels and, with the local keys, its NICs address it
    u64 heap_bytes;
    u64 unread_behind_heap_bytes;
    u64 remote_heaps;  // -> u64[pes]: with the remote keys
    u8 unread_behind_remote_heaps[1];
    u8 by_rails;  // requests go through another PE of the target's node
    u8 unread_behind_by_rails[694];
    u8 has_ibgda;  // decides what kernels use, up to 3.5
    u8 unread_behind_has_ibgda[3];
    u32 transport;  // decides it since kTransportSince
};
static_assert(__builtin_offsetof(DeviceState, pe) == 4 && __builtin_offsetof(DeviceState, pes) == 8 &&
                  __builtin_offsetof(DeviceState, heap) == 40 && __builtin_offsetof(DeviceState, heap_bytes) == 48 &&
                  __builtin_offsetof(DeviceState, remote_heaps) == 64 &&
                  __builtin_offsetof(DeviceState, by_rails) == 73 &&
                  __builtin_offsetof(DeviceState, has_ibgda) == 768 &&
                  __builtin_offsetof(DeviceState, transport) == 772 && sizeof(DeviceState) == 776,
              "NVSHMEM's device state");

struct Key {
    u32 key;  // big endian, as a NIC takes it
    u32 unread;
    // Where the memory that it is for ends: an address for a local key, an offset in the heap for a remote one. What is
    // registered at once has one key, which then stands in the entry of each of its chunks.
    u64 end;
};
static_assert(__builtin_offsetof(Key, key) == 0 && __builtin_offsetof(Key, end) == 8 && sizeof(Key) == 16, "a key");

// nvshmemi_ibgda_device_state_d
struct IbgdaState {
    u8 unread[28];
    u32 rcs_per_pe;  // of each NIC
    u8 unread_behind_rcs_per_pe[8];
    u64 chunk_log2;  // the heap is registered in chunks
    u32 nics;        // of every PE
    u8 unread_behind_nics[3];
    u8 cpu_rings;                   // kernels leave the doorbells to a thread of the host
    Key keys[kKeysInState];         // [chunks, nics]
    Key remote_keys[kKeysInState];  // [chunks, pes, nics]
    u8 unread_behind_remote_keys[6168];
    u64 queue_pairs;  // -> QueuePair[], moved by nvshmemx_qp_create; null: there are none
    u64 unread_behind_queue_pairs[2];
    u64 more_keys;           // -> Key[]: from index kKeysInState on
    u64 more_remote_keys;    // the same
    u32 default_rcs_per_pe;  // since kDefaultRcsSince: without those of nvshmemx_qp_create
    u8 unread_behind_default_rcs_per_pe[68];
};
static_assert(__builtin_offsetof(IbgdaState, rcs_per_pe) == 28 && __builtin_offsetof(IbgdaState, chunk_log2) == 40 &&
                  __builtin_offsetof(IbgdaState, nics) == 48 && __builtin_offsetof(IbgdaState, cpu_rings) == 55 &&
                  __builtin_offsetof(IbgdaState, keys) == 56 && __builtin_offsetof(IbgdaState, remote_keys) == 1080 &&
                  __builtin_offsetof(IbgdaState, queue_pairs) == 8272 &&
                  __builtin_offsetof(IbgdaState, more_keys) == 8296 &&
                  __builtin_offsetof(IbgdaState, more_remote_keys) == 8304 &&
                  __builtin_offsetof(IbgdaState, default_rcs_per_pe) == 8312 && sizeof(IbgdaState) == 8384,
              "NVSHMEM's state of IBGDA");

// Counts of 64-byte blocks since NVSHMEM has made the queue pair, and the lock of its doorbell: what every kernel that
// posts to it must go by, NVSHMEM's and ours.
struct QueuePair {
    u32 unread;
    u32 kind;
    u32 number;
    u32 nic;  // of this PE, and of the peer: the one of the same index
    u8 unread_behind_nic[8];
    u64 returned;      // what atomics return goes here
    u32 returned_key;  // big endian
    u32 unread_behind_returned_key;
    u16 blocks;  // of the ring
    u8 unread_behind_blocks[6];
    u64 ring;
    u64 record;      // of the doorbell record the second word, the send counter
    u64 doorbell;    // the NIC's register
    u64 completion;  // -> CompletionQueue
    u8 unread_behind_completion[12];
    u32 posting;    // Lock of `rung`, record and doorbell
    u64 reserved;   // handed out to threads
    u64 filled;     // written, without gaps
    u64 rung;       // told to the NIC
    u64 completed;  // at least so many are done
    u8 unread_behind_completed[56];
};
static_assert(__builtin_offsetof(QueuePair, kind) == 4 && __builtin_offsetof(QueuePair, number) == 8 &&
                  __builtin_offsetof(QueuePair, nic) == 12 && __builtin_offsetof(QueuePair, returned) == 24 &&
                  __builtin_offsetof(QueuePair, returned_key) == 32 && __builtin_offsetof(QueuePair, blocks) == 40 &&
                  __builtin_offsetof(QueuePair, ring) == 48 && __builtin_offsetof(QueuePair, record) == 56 &&
                  __builtin_offsetof(QueuePair, doorbell) == 64 && __builtin_offsetof(QueuePair, completion) == 72 &&
                  __builtin_offsetof(QueuePair, posting) == 92 && __builtin_offsetof(QueuePair, reserved) == 96 &&
                  __builtin_offsetof(QueuePair, filled) == 104 && __builtin_offsetof(QueuePair, rung) == 112 &&
                  __builtin_offsetof(QueuePair, completed) == 120 && sizeof(QueuePair) == 184,
              "NVSHMEM's queue pair");

// Collapsed: the NIC writes every completion into the same 64 bytes.
struct CompletionQueue {
    u8 unread[16];
    u64 cqe;
    u8 unread_behind_cqe[48];
};
static_assert(__builtin_offsetof(CompletionQueue, cqe) == 16 && sizeof(CompletionQueue) == 72, "completion queue");

}  // namespace deep_ep::wire::nvshmem
