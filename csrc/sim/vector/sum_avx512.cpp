#if defined(__x86_64__)

#define DEEP_EP_TARGET __attribute__((target("avx512f")))
#define DEEP_EP_VECTOR_BYTES 64
#include "sim/vector/sum_body.h"
#include "sim/vector/sum_versions.h"

namespace deep_ep::cpu {

void sum_avx512(void* dst, const u8* const* src, const float* weights, unsigned n, const void* bias0, const void* bias1,
                size_t elements) {
    sum(dst, src, weights, n, bias0, bias1, elements);
}

}  // namespace deep_ep::cpu

#endif
