// Measured on one core of a Zen 5 server: 14336-byte rows from 5.25 of 8 windows of 300 MB, GB/s read.
//
//   cold rows               vectors of 16 bytes 20, 32 bytes 25, 64 bytes 28
//   prefetch 2 KiB ahead    23, 31, 30; at less than 1 KiB: slower than none
//   rows in the caches      25, 45, 80
//   four vectors at once    slower than two
//   streaming the result    +10 %, but a fence per row and a cold result for small batches
//   8 ranks on 2 cores      all between 55 and 62 together: the limit of the memory
#include "sim/vector/sum_versions.h"

namespace deep_ep::cpu {
namespace {

SumBf16 widest_usable() {
    const SumVersions versions = sum_versions();
    size_t i = 0;
    while (!versions.first[i].usable) ++i;
    return versions.first[i].sum;
}

const SumBf16 chosen = widest_usable();

}  // namespace

SumVersions sum_versions() {
#if defined(__x86_64__)
    __builtin_cpu_init();  // may run before libgcc has done it
#endif
    static const SumVersion versions[] = {
#if defined(__x86_64__)
        {"avx512", sum_avx512, __builtin_cpu_supports("avx512f") != 0},
        {"avx2", sum_avx2, __builtin_cpu_supports("avx2") != 0},
#endif
        {"baseline", sum_baseline, true},
    };
    return {versions, sizeof(versions) / sizeof(versions[0])};
}

void sum_bf16(void* dst, const u8* const* src, const float* weights, unsigned n, const void* bias0, const void* bias1,
              size_t elements) {
    chosen(dst, src, weights, n, bias0, bias1, elements);
}

}  // namespace deep_ep::cpu
