// The functions a kernel may call. One contract, two implementations: device/cuda (nvcc, NVRTC) and sim/device (g++,
// clang++).
//
// Besides the names below, a kernel uses plain CUDA C++: threadIdx, blockIdx, blockDim, gridDim (x only), __global__,
// __syncthreads(), __syncthreads_or(predicate), __syncwarp(mask), __shfl_sync, __shfl_up_sync, __shfl_xor_sync,
// __ballot_sync, __any_sync, __all_sync, __popc, __ffs, min, max. It must not use: a literal 32 for the warp width
// (kWarpSize is 1 in the CPU's fast build), `__shared__` (use DEEP_EP_SHARED), inline PTX, <<<>>>.
//
// clang-format off
//   DEEP_EP_DEVICE                 function qualifier: inline on the device
//   DEEP_EP_DEVICE_CALL            the same, but not inlined: for code that is long and rare
//   DEEP_EP_KERNEL                 qualifier for a kernel's entry point
//   DEEP_EP_ARGUMENT               qualifier for its only parameter, a const value
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
//     fence_release<S>()           what the thread has stored and acquired so far is released by its later store_fenced()
//                                  and add_fenced(), which then need no fence each
//     store_fenced<S>(p, v)  add_fenced<S>(p, v)
//                                  as store_relaxed and add_relaxed, behind a fence_release
//     read_once(value)             returns the value, which the compiler cannot load again from its origin
//                                  of u32
//     add_relaxed<S>(p, v)  add_release<S>(p, v)
//                                  of u32, u64, i32; at block scope of a word in shared memory, else of one in global
//                                  memory (the exact builds check it). The thread waits for nothing
//     fetch_add_relaxed<S>(p, v)  fetch_add_release<S>(p, v)  fetch_add_acq_rel<S>(p, v)
//                                  the same, wherever the word is; returns the old value
//     cas_relaxed<S>(p, expected, desired)  cas_acquire<S>(...)  cas_release<S>(...)  cas_acq_rel<S>(...)
//                                  of u32, u64; returns the old value
//     exchange_acquire<S>(p, v)    of u64; returns the old value, which proves that the new one is in place
//     bool barrier_or(id, threads, value)
//                                  named barrier 1..15, `threads` a multiple of kWarpSize; returns whether any thread
//                                  passed true
//     u64 now_ns()                 a clock that only moves forward
//     bool spin_until(ready, deadline_ns, what)
//                                  one thread: calls ready() until it returns true or the clock passes the deadline;
//                                  returns whether it returned true. `what`: WaitNote*, read only while waiting,
//                                  describes the wait in a dump
//     bool spin_until(ready, rarely, deadline_ns, what)
//                                  the same; rarely(), which is expensive and called from time to time, ends the wait
//                                  too
//     void warp_copy(dst, src, bytes)
//                                  all lanes call it; bytes and addresses multiples of 16; orders nothing: __syncwarp
//                                  before others read
//     class RowCopies              a warp's copies of rows in global memory, each to several places. One object per
//                                  warp and kernel, constructed by all lanes
//       kSharedBytes               shared memory per warp, 128-byte aligned; the launch allocates it
//       RowCopies(shared)          called after the barrier from which on the targets may be written
//       to_many(dst[], n, src, bytes, streaming)
//                                  one read, n writes; bytes and addresses multiples of 16. The copies may still be
//                                  in progress when it returns: until finish(), no target may be read or signaled,
//                                  and the source must stay. `dst` may be written again after a __syncwarp
//       load(src, bytes)           begins to load a row that a later to_many() copies: the next one, or the one after
//                                  it if the next one's row is being loaded. Rows are copied in the order in which
//                                  they were loaded, and all have the same size
//       read_what_came()           the sources of later loads and copies may have arrived while this kernel runs:
//                                  another agent stored them before what the first lane has acquired. And the shared
//                                  memory may have been in use for sums
//       finish()                   afterwards all copies are as if the lanes had stored them, and a __syncwarp has
//                                  passed
//     class RowSums                a warp's sums of rows in global memory. One object per warp and kernel, constructed
//                                  by all lanes
//       kSharedBytes               shared memory per warp, 128-byte aligned; the launch allocates it. The warp's
//                                  RowCopies may have the same, if each has finished before the other is used
//       sum_bf16(dst, src[], n, bias0, bias1, elements)
//       weighted_sum_bf16(dst, src[], weights[], n, elements)
//                                  like warp_sum_bf16 and warp_weighted_sum_bf16; the rows may have arrived while this
//                                  kernel runs, before what the first lane has acquired
//     void warp_sum_bf16(dst, src[], n, bias0, bias1, elements)
//                                  dst = bf16((((0 + src[0]) + src[1]) + ...) + bias0 + bias1), in fp32, rounded once
//                                  to nearest even; null biases are skipped; elements a multiple of 8
//     void warp_weighted_sum_bf16(dst, src[], weights[], n, elements)
//                                  dst = bf16(((0 + weights[0] * src[0]) + weights[1] * src[1]) + ...), in fp32, each
//                                  product rounded, the sum rounded once; elements a multiple of 8
//     void warp_copy_to_many(dst[], n, src, bytes, streaming)
//                                  one read, n writes, bypassing the caches if `streaming`; otherwise like warp_copy
//     void warp_cast_e4m3(dst, src, elements, scales, part, parts)
//                                  casts a row of bf16 to one of e4m3 followed by its scales, see fp8_scales.h, or one
//                                  of `parts` parts of it; elements a multiple of kScaleGroup; otherwise like warp_copy
//     bool warp_cast_logfmt(head, rest, src, elements)
//                                  casts a row of bf16 to the head and the rest of one of LogFMT, see logfmt.h;
//                                  elements a multiple of kLogGroup; otherwise like warp_copy. Returns, in each lane,
//                                  whether one of its groups stays bf16: if none does in any lane, the rest was not
//                                  written
//     void warp_weighted_sum_logfmt(dst, src[], weights[], n, elements, rows)
//                                  warp_weighted_sum_bf16 of LogFMT rows, whose heads are src[] and whose rests are
//                                  where `rows` says; elements a multiple of kLogGroup
//   The warp collectives read `dst`, `src` and `weights` arrays that all lanes see (shared memory or equal copies per
//   lane).
// clang-format on
#pragma once

#include "wire/types.h"

namespace deep_ep::device {

// The scope of the memory order that an access takes part in. kBlock: threads of one block. kDevice: one GPU (the
// kernels of one rank). kSystem: other GPUs, the host, NICs. On a CPU all three compile to the same instruction; the
// executor checks the scope instead.
enum class Scope { kBlock, kDevice, kSystem };

// Describes what a thread waits for, for the dump of a stalled run and for DeepEPTimeout. It is on the waiting thread's
// stack.
struct WaitNote {
    const char* what;  // e.g. "dispatch: data signal"
    i32 peer;          // the rank that ends the wait; -1 if there is none
    u64 expected;
    const u64* word;  // the polled word, whose value a dump shows; null if there is none
};

}  // namespace deep_ep::device

// The build names another body where there is no GPU.
#ifndef DEEP_EP_DEVICE_BODY
#define DEEP_EP_DEVICE_BODY "device/cuda/body.h"
#endif
#include DEEP_EP_DEVICE_BODY
