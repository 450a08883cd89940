// The versions of sum_bf16, one per instruction set.
#pragma once

#include "sim/vector/vector.h"

namespace deep_ep::cpu {

void sum_baseline(void* dst, const u8* const* src, const float* weights, unsigned n, const void* bias0,
                  const void* bias1, size_t elements);
#if defined(__x86_64__)
void sum_avx2(void* dst, const u8* const* src, const float* weights, unsigned n, const void* bias0, const void* bias1,
              size_t elements);
void sum_avx512(void* dst, const u8* const* src, const float* weights, unsigned n, const void* bias0, const void* bias1,
                size_t elements);
#endif

}  // namespace deep_ep::cpu
