// The parts of NVSHMEM's device-side state that this library reads: its queue pairs for IBGDA, its keys, and the
// addresses of its heaps. Only the fields that are read have names, which are ours. scripts/nvshmem_layouts.py asks the
// compiler for their offsets in NVSHMEM's own headers, and tests/transport/network/test_nvshmem_tables.py compares what
// it found (tests/support/data/nvshmem) with these tables.
//
// NVSHMEM's host library copies the two states to the device symbols of every module that is registered with it
// (nvshmemx_cumodule_init), so their contents depend on its version, never on that of a header. Within major version 3
// the states only grow: the device state has 776 bytes up to 3.6, 816 in 3.7 and 848 in 3.8; the IBGDA state always has
// 8384, with new fields in former padding. Up to 3.6 the host library copies as many bytes as its own state has;
// from 3.7 on it asks for the size of the symbol. A symbol of 776 bytes is therefore right for all versions, and what
// follows those bytes is never read. The one difference in meaning is the order of queue pairs in the table
// (kTableByQueueSince).
//
// All pointers are addresses in device memory, which the host reads by copies, so here they are integers.
#pragma once

#include "wire/types.h"

namespace deep_ep::wire::nvshmem {

// Versions of the host library, in the order of their releases.
constexpr u32 version(u32 major, u32 minor, u32 patch) { return major << 20 | minor << 10 | patch; }
constexpr u32 kMajor = 3;
// The oldest version whose tables are known. Later ones of the same major version are assumed to be like the newest
// known one, since NVSHMEM stays compatible with modules compiled for an older version. It has nevertheless changed the
// order of queue pairs once, so a reader of the table checks that no queue pair leads to its own PE.
constexpr u32 kOldest = version(3, 4, 5);
// Before: queue_pairs[(pe * rcs_per_pe + queue) * nics + nic]. Since then:
// queue_pairs[(nic * default_rcs_per_pe + queue) * pes + pe], followed in the same order by the queue pairs that
// nvshmemx_qp_create has added; its handles are the indices of those to PE 0.
constexpr u32 kTableByQueueSince = version(3, 5, 0);
// Before this version, with several NICs per PE, the second NIC's queue pairs overwrite the first's in the table.
constexpr u32 kSeveralNicsSince = version(3, 7, 0);
// Fields that were added later. Before that their place is meaningless padding.
constexpr u32 kDefaultRcsSince = version(3, 5, 0);
constexpr u32 kTransportSince = version(3, 6, 0);

enum Transport : u32 { kProxy = 0, kIbgda = 1, kGpuNetIo = 2 };
enum QueuePairKind : u32 { kDci = 1, kDct = 2, kRc = 3 };
constexpr u32 kNoNumber = ~0u;  // number of a queue pair that does not exist, such as that of a PE to itself
// Lock of a queue pair (posting): kernels go from kUnlocked to kLocked by compare-and-swap.
enum Lock : u32 { kUnlocked = 0, kLocked = 1 };

// nvshmemx_init_status. From kInitialized on there is a device, and a module can be registered.
enum InitStatus : u32 { kNotInitialized = 0, kBootstrapped = 1, kInitialized = 2, kLimitedMpg = 3, kFullMpg = 4 };

constexpr u32 kMaxNics = 15;        // per PE
constexpr u32 kKeysInState = 64;    // of each kind; the others are in a separate table
constexpr u32 kMaxBlocks = 32768;   // WQEBBs per send queue: NVSHMEM_QP_DEPTH
constexpr u32 kSlotBytes = 256;     // per slot of QueuePair::returned; the first slot takes values that are never read
constexpr u64 kMaxBytes = 1 << 30;  // per request

// nvshmemi_device_state_d
struct DeviceState {
    u32 unread;
    u32 pe;
    u32 pes;
    u32 unread_behind_pes[7];
    u64 heap;  // this PE's, as addressed by its kernels and, with the local keys, by its NICs
    u64 heap_bytes;
    u64 unread_behind_heap_bytes;
    u64 remote_heaps;  // -> u64[pes]: with the remote keys
    u8 unread_behind_remote_heaps[1];
    u8 by_rails;  // requests go through another PE in the node of the target
    u8 unread_behind_by_rails[694];
    u8 has_ibgda;  // up to 3.5: decides what kernels use
    u8 unread_behind_has_ibgda[3];
    u32 transport;  // since kTransportSince: decides what kernels use
};
static_assert(__builtin_offsetof(DeviceState, pe) == 4 && __builtin_offsetof(DeviceState, pes) == 8 &&
                  __builtin_offsetof(DeviceState, heap) == 40 && __builtin_offsetof(DeviceState, heap_bytes) == 48 &&
                  __builtin_offsetof(DeviceState, remote_heaps) == 64 &&
                  __builtin_offsetof(DeviceState, by_rails) == 73 &&
                  __builtin_offsetof(DeviceState, has_ibgda) == 768 &&
                  __builtin_offsetof(DeviceState, transport) == 772 && sizeof(DeviceState) == 776,
              "NVSHMEM's device state");

struct Key {
    u32 key;  // big endian, as the NIC expects it
    u32 unread;
    // The end of the memory that it covers: an address for a local key, an offset in the heap for a remote one. Memory
    // that is registered in one call has one key, which is then repeated in the entry of each of its chunks.
    u64 end;
};
static_assert(__builtin_offsetof(Key, key) == 0 && __builtin_offsetof(Key, end) == 8 && sizeof(Key) == 16, "a key");

// nvshmemi_ibgda_device_state_d
struct IbgdaState {
    u8 unread[28];
    u32 rcs_per_pe;  // per NIC
    u8 unread_behind_rcs_per_pe[8];
    u64 chunk_log2;  // the heap is registered in chunks
    u32 nics;        // per PE
    u8 unread_behind_nics[3];
    u8 cpu_rings;                   // a host thread rings the doorbells instead of kernels
    Key keys[kKeysInState];         // [chunks, nics]
    Key remote_keys[kKeysInState];  // [chunks, pes, nics]
    u8 unread_behind_remote_keys[6168];
    u64 queue_pairs;  // -> QueuePair[], reallocated by nvshmemx_qp_create; null: there are none
    u64 unread_behind_queue_pairs[2];
    u64 more_keys;           // -> Key[]: from index kKeysInState on
    u64 more_remote_keys;    // the same
    u32 default_rcs_per_pe;  // since kDefaultRcsSince; excludes those of nvshmemx_qp_create
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

// A queue pair. Every kernel that posts to it, NVSHMEM's or ours, must use its counters, in WQEBBs since NVSHMEM
// created the queue pair, and the lock of its doorbell.
struct QueuePair {
    u32 unread;
    u32 kind;
    u32 number;
    u32 nic;  // index of this PE's NIC, and of the peer's
    u8 unread_behind_nic[8];
    u64 returned;      // where atomics return the old value
    u32 returned_key;  // big endian
    u32 unread_behind_returned_key;
    u16 blocks;  // WQEBBs in the ring
    u8 unread_behind_blocks[6];
    u64 ring;
    u64 record;      // the send counter: the second word of the doorbell record
    u64 doorbell;    // the NIC's register
    u64 completion;  // -> CompletionQueue
    u8 unread_behind_completion[12];
    u32 posting;    // Lock of `rung`, record and doorbell
    u64 reserved;   // reserved by threads
    u64 filled;     // written, without gaps
    u64 rung;       // announced to the NIC
    u64 completed;  // a lower bound on those that are done
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
