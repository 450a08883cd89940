// Formats of an mlx5 (ConnectX) queue pair, as kernels write them and a NIC reads them: work requests (WQE),
// completions (CQE), doorbell record and doorbell. Everything is big endian in memory. tests/native/mlx5_header.cpp
// compares them byte for byte with the setters of rdma-core.
//
// A send queue is a ring of 64-byte basic blocks (WQEBB). Every request used here takes one: control, remote address,
// and one of
//
//   RDMA write            data segment
//   inline RDMA write     inline payload of one word
//   fetch and add         atomic segment, data segment for the old value
#pragma once

#include "wire/types.h"

namespace deep_ep::wire::mlx5 {

// To or from big endian. Compilers turn these shifts into one instruction, on CPUs and GPUs.
constexpr u32 big(u32 v) { return v << 24 | (v & 0xff00u) << 8 | (v >> 8 & 0xff00u) | v >> 24; }
constexpr u64 big(u64 v) { return static_cast<u64>(big(static_cast<u32>(v))) << 32 | big(static_cast<u32>(v >> 32)); }
static_assert(big(0x01020304u) == 0x04030201u && big(0x0102030405060708ull) == 0x0807060504030201ull, "byte order");

constexpr u32 kBlockBytes = 64;  // MLX5_SEND_WQE_BB

// The NIC counts WQEBBs modulo 2^16; half of that range tells old from new.
constexpr u32 kMaxBlocks = 1u << 15;
constexpr u64 kMaxMessageBytes = 1ull << 30;  // log_msg_max of the connection

enum Opcode : u32 { kRdmaWrite = 0x08, kFetchAdd = 0x12 };
constexpr u32 kUnitsOfWrite = 3, kUnitsOfFetchAdd = 4;  // in units of 16 bytes

struct alignas(16) Control {
    u32 opcode;  // modifier 8 | index 16 | opcode 8
    u32 queue;   // queue pair number 24 | units 8
    u32 flags;   // signature 8 | stream 16 | fence 3, completion 2, solicited 1
    u32 immediate;
};
struct alignas(16) RemoteAddress {
    u64 address;
    u32 key;
    u32 reserved;
};
struct alignas(16) Data {
    u32 bytes;
    u32 key;
    u64 address;
};
struct alignas(16) Inline {
    u32 bytes;  // with kInline
    u32 payload[3];
};
struct alignas(16) Atomic {
    u64 add;
    u64 compare;  // unused by fetch and add
};
static_assert(sizeof(Control) == 16 && sizeof(RemoteAddress) == 16 && sizeof(Data) == 16 && sizeof(Inline) == 16 &&
                  sizeof(Atomic) == 16,
              "segments");

constexpr u32 kInline = 1u << 31;
constexpr u32 kCompletion = 0x08;  // in `flags`: always write a CQE
constexpr u32 kCompletionMask = 0x0c, kSolicited = 0x02;

constexpr Control control(Opcode opcode, u64 index, u32 queue_pair, u32 units, bool completion) {
    return {big(static_cast<u32>(index & 0xffff) << 8 | opcode), big(queue_pair << 8 | units),
            big(completion ? kCompletion : 0u), 0};
}
constexpr RemoteAddress remote_address(u64 address, u32 big_key) { return {big(address), big_key, 0}; }
constexpr Data data(u64 address, u32 big_key, u32 bytes) { return {big(bytes), big_key, big(address)}; }
constexpr Inline inline_word(u64 value) {  // in little-endian byte order
    return {big(8u | kInline), {static_cast<u32>(value), static_cast<u32>(value >> 32), 0}};
}
constexpr Atomic fetch_add(u64 add) { return {big(add), 0}; }

// One request, in one WQEBB.
struct alignas(kBlockBytes) Block {
    Control control;
    RemoteAddress remote;
    union {
        Data data;
        Inline inlined;
        Atomic atomic;
    };
    Data returned;  // for fetch and add: where the old value goes
};
static_assert(sizeof(Block) == kBlockBytes, "one block of the ring");

// Doorbell record, in memory that the NIC reads: the number of WQEBBs produced. It is written before the doorbell,
// which is a register.
struct alignas(8) DoorbellRecord {
    u32 receive;
    u32 send;
};
static_assert(sizeof(DoorbellRecord) == 8, "doorbell record");

constexpr u32 send_counter(u64 produced) { return big(static_cast<u32>(produced & 0xffff)); }
// The first 8 bytes of a control segment, as one 64-bit store.
constexpr u64 doorbell(u32 queue_pair, u64 produced) {
    return static_cast<u64>(big(queue_pair << 8)) << 32 | big(static_cast<u32>(produced & 0xffff) << 8);
}
constexpr u32 doorbell_counter(u64 doorbell) { return big(static_cast<u32>(doorbell)) >> 8 & 0xffff; }
constexpr u32 doorbell_queue(u64 doorbell) { return big(static_cast<u32>(doorbell >> 32)) >> 8; }
static_assert(doorbell_counter(doorbell(0xabcdef, 0x12345)) == 0x2345 &&
                  doorbell_queue(doorbell(0xabcdef, 0x12345)) == 0xabcdef,
              "doorbell: 24 bits of queue pair, 16 of counter");

// Completion. The queue is collapsed: the NIC writes every CQE into the same 64 bytes, `tail` last.
struct alignas(64) Cqe {
    u8 reserved[54];
    u8 vendor;         // for an error
    u8 syndrome;       // for an error
    u32 opcode_queue;  // opcode of the request 8 | queue pair number 24
    u32 tail;          // index of the request 16 | signature 8 | kind 4, format 2, solicited 1, owner 1
};
static_assert(sizeof(Cqe) == 64, "completion");

enum CqeKind : u32 { kRequestDone = 0x0, kRequestError = 0xd, kInvalidCqe = 0xf };
constexpr u32 cqe_tail(u64 index, CqeKind kind) { return big(static_cast<u32>(index & 0xffff) << 16 | kind << 4); }
constexpr u32 cqe_index(u32 tail) { return big(tail) >> 16; }
constexpr u32 cqe_kind(u32 tail) { return big(tail) >> 4 & 0xf; }
// A CQE that has never been written is all ones: its kind is invalid, and its index says that nothing is done.
static_assert(cqe_kind(~0u) == kInvalidCqe && ((cqe_index(~0u) + 1) & 0xffff) == 0, "an empty completion queue");
static_assert(cqe_index(cqe_tail(0x12345, kRequestError)) == 0x2345 &&
                  cqe_kind(cqe_tail(7, kRequestError)) == kRequestError,
              "completion: 16 bits of index");
// Whether a CQE says that `count` WQEBBs are done. It must be read after `count`, so it may also cover WQEBBs that
// other threads have posted since. At most half of the 2^16 WQEBBs that the index can distinguish are in flight.
constexpr bool cqe_covers(u32 tail, u64 count) { return ((cqe_index(tail) + 1 - count) & 0xffff) < 0x8000; }
static_assert(cqe_covers(~0u, 0) && !cqe_covers(~0u, 1) && !cqe_covers(~0u, 0x8000), "nothing is done");
static_assert(cqe_covers(cqe_tail(0xffff, kRequestDone), 0x10000) &&
                  !cqe_covers(cqe_tail(0xfffe, kRequestDone), 0x10000),
              "all is done, or all but one block");
static_assert(cqe_covers(cqe_tail(0x10005, kRequestDone), 0x10000), "and more, that others have posted since");

enum Syndrome : u32 {
    kLocalLength = 0x01,
    kLocalOperation = 0x02,
    kLocalProtection = 0x04,
    kFlushed = 0x05,
    kRemoteRequest = 0x12,
    kRemoteAccess = 0x13,
    kRemoteOperation = 0x14,
    kRetriesExceeded = 0x15,
};

constexpr const char* syndrome_name(u32 syndrome) {
    switch (syndrome) {
        case kLocalLength:
            return "local length error";
        case kLocalOperation:
            return "local operation error";
        case kLocalProtection:
            return "local protection error";
        case kFlushed:
            return "flushed after an earlier error";
        case kRemoteRequest:
            return "remote invalid request";
        case kRemoteAccess:
            return "remote access error";
        case kRemoteOperation:
            return "remote operation error";
        case kRetriesExceeded:
            return "retries exceeded: the peer does not answer";
        default:
            return "error";
    }
}

}  // namespace deep_ep::wire::mlx5
