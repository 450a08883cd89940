// The CPU's substitute for the work of a warp: copies and row sums as vector operations. Independent of fibers and
// kernels.
#pragma once

#include <cstddef>

#include "wire/types.h"

namespace deep_ep::cpu {

void copy(void* dst, const void* src, size_t bytes);

// Copies row after row with non-temporal stores, which bypass the caches. Ends with a store fence, since x86 does not
// order such stores before a later release store.
void stream_rows(u8* const* dst, const u8* const* src, size_t n, size_t row_bytes);

// Copies one source to `n` destinations. `streaming`: with non-temporal stores and one fence at the end.
void copy_to_many(u8* const* dst, unsigned n, const void* src, size_t bytes, bool streaming);

// The number of bytes, written by all ranks of this machine in one operation, above which streaming is faster. Fewer
// bytes fit in the caches.
size_t streaming_threshold();

// dst = bf16((((0 + src[0]) + src[1]) + ...) + bias0 + bias1): fp32, rounded once, to nearest even. Null biases are
// skipped. Every NaN becomes 0x7fff. With weights src[k] stands for weights[k] * src[k], rounded before it is added.
// Rows need no alignment; `elements` is a multiple of 8.
void sum_bf16(void* dst, const u8* const* src, const float* weights, unsigned n, const void* bias0, const void* bias1,
              size_t elements);

using SumBf16 = void (*)(void*, const u8* const*, const float*, unsigned, const void*, const void*, size_t);

// The versions of sum_bf16, widest first. All give bitwise equal results; sum_bf16 is the first that this CPU can run.
struct SumVersion {
    const char* instructions;
    SumBf16 sum;
    bool usable;
};
struct SumVersions {
    const SumVersion* first;
    size_t count;
};
SumVersions sum_versions();

// Makes every page of [address, address + bytes) present and writable, without changing its contents.
void pretouch(void* address, size_t bytes);

}  // namespace deep_ep::cpu
