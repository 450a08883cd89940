// What a kernel may call. One contract, two bodies: device/cuda (nvcc, NVRTC) and device/cpu (g++, clang++).
//
// Besides the names below a kernel uses plain CUDA C++: threadIdx, blockIdx, blockDim, gridDim (x only), __global__,
// __syncthreads(), __syncthreads_or(predicate), __syncwarp(mask), __shfl_sync, __shfl_up_sync, __shfl_xor_sync,
// __ballot_sync, __any_sync, __all_sync, __popc, __ffs, min, max. It must not use: literal 32 for the warp width
// (kWarpSize is 1 in the CPU's fast build), `__shared__` (DEEP_EP_SHARED), inline PTX, bare fences, <<<>>>.
//
// clang-format off
//   DEEP_EP_DEVICE                 function qualifier: inline on the device
//   DEEP_EP_DEVICE_CALL            the same, but called: for what is long and rare
//   DEEP_EP_KERNEL                 qualifier of a kernel's entry point
//   DEEP_EP_ARGUMENT               qualifier of its only parameter, a const value
//   DEEP_EP_SHARED(type, name)     a block's static shared variable: DEEP_EP_SHARED(u32[4], flags);
//   DEEP_EP_DYNAMIC_SHARED(type, name)
//                                  pointer to the launch's dynamic shared memory, 128-byte aligned; at most one per
//                                  kernel
//
//   namespace deep_ep::device
//     constexpr u32 kWarpSize, kFullMask
//                                  lanes of a warp, and a mask of all of them
//     u32 lane(), warp(), warps()  of the calling thread, within its block
//     enum class Scope { kBlock, kDevice, kSystem }
//     load_relaxed<S>(p)  load_acquire<S>(p)  store_relaxed<S>(p, v)  store_release<S>(p, v)
//                                  of u32, u64, i32, i64
//     read_once(value)             the value, which the compiler cannot load again from where it came
//                                  of u32
//     add_relaxed<S>(p, v)  add_release<S>(p, v)  add_acq_rel<S>(p, v)   -> old value
//                                  of u32, u64, i32
//     cas_relaxed<S>(p, expected, desired)  cas_acquire<S>(...)  cas_release<S>(...)  cas_acq_rel<S>(...)   -> old value
//                                  of u32, u64
//     exchange_acquire<S>(p, v)    -> old value
//                                  of u64; its return says that the new value is in place
//     bool barrier_or(id, threads, value)
//                                  named barrier 1..15, `threads` a multiple of kWarpSize; whether any of them has
//                                  brought true
//     u64 now_ns()                 a clock that only moves forward
//     bool spin_until(ready, deadline_ns, what)
//                                  calls ready() until it returns true (-> true) or the clock passes the deadline (->
//                                  false). One thread. `what`: WaitNote*, read only while waiting, describes the wait
//                                  in a dump
//     bool spin_until(ready, rarely, deadline_ns, what)
//                                  the same; rarely(), which is dear, ends it too, and is called now and then
//     void warp_copy(dst, src, bytes)
//                                  all lanes call it; bytes and addresses multiples of 16; orders nothing: __syncwarp
//                                  before others read
//     class RowCopies              a warp's copies of rows in global memory, each to several places. One object per
//                                  warp and kernel, made by all lanes
//       kSharedBytes               of shared memory for each warp, 128-byte aligned; the launch allots it
//       RowCopies(shared)          after the barrier behind which the targets may be written
//       to_many(dst[], n, src, bytes, streaming)
//                                  one read, n writes; bytes and addresses multiples of 16. The copies may still be
//                                  under way when it returns: until finish() no target may be read or signalled, and
//                                  the source must stay. `dst` may be written again after a __syncwarp
//       read_what_came()           the sources of later copies may have come while this kernel runs: another agent stored
//                                  them before what the first lane has acquired
//       finish()                   all copies are as if the lanes had stored them, and a __syncwarp has passed
//     class RowSums                a warp's sums of rows in global memory. One object per warp and kernel, made by all lanes
//       kSharedBytes               of shared memory for each warp, 128-byte aligned; the launch allots it
//       sum_bf16(dst, src[], n, bias0, bias1, elements)
//                                  as warp_sum_bf16; the rows may have come while this kernel runs, before what the first
//                                  lane has acquired
//     void warp_sum_bf16(dst, src[], n, bias0, bias1, elements)
//                                  dst = bf16((((0 + src[0]) + src[1]) + ...) + bias0 + bias1), in fp32, rounded once
//                                  to nearest even; null biases are skipped; elements a multiple of 8
//     void warp_weighted_sum_bf16(dst, src[], weights[], n, elements)
//                                  dst = bf16(((0 + weights[0] * src[0]) + weights[1] * src[1]) + ...), in fp32, each
//                                  product rounded, the sum rounded once; elements a multiple of 8
//     void warp_copy_to_many(dst[], n, src, bytes, streaming)
//                                  one read, n writes, past the caches if `streaming`; else as warp_copy
//     void warp_cast_e4m3(dst, src, elements, scales)
//                                  a row of bf16 to one of e4m3 with its scales behind it, as e4m3.h has them; elements
//                                  a multiple of kScaleGroup; else as warp_copy
//     bool warp_cast_logfmt(head, rest, src, elements)
//                                  a row of bf16 to the head and the rest of one of LogFMT, as logfmt.h has them; elements
//                                  a multiple of kLogGroup; else as warp_copy. Each lane is told whether a group of its
//                                  own stays bf16: where no lane's does, the rest was not written
//     void warp_weighted_sum_logfmt(dst, src[], weights[], n, elements, rows)
//                                  warp_weighted_sum_bf16 of rows of LogFMT, whose heads are src[] and whose rests
//                                  lie as `rows` says; elements a multiple of kLogGroup
//   The warp collectives read `dst`, `src` and `weights` arrays that all lanes see (shared memory or equal per-lane copies).
// clang-format on
#pragma once

#include "wire/types.h"

namespace deep_ep::device {

// The order of memory that an access takes part in. kBlock: threads of one block. kDevice: one GPU (one rank's
// kernels). kSystem: other GPUs, the host, NICs. On a CPU all three are the same instruction; the executor checks the
// scope instead.
enum class Scope { kBlock, kDevice, kSystem };

// Says what a thread waits for, for the dump of a stalled run and for DeepEPTimeout. Lives on the waiting thread's
// stack.
struct WaitNote {
    const char* what;  // e.g. "dispatch: data signal"
    i32 peer;          // the rank that ends the wait, -1 where there is none
    u64 expected;
    const u64* word;  // the word polled, null where there is none: a dump shows its value
};

}  // namespace deep_ep::device

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "device/cuda/body.h"
#else
#include "device/cpu/body.h"
#endif
