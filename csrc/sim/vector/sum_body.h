// The sum of bfloat16 rows over GCC's vector types. Included by one file per instruction set, which defines
// DEEP_EP_TARGET and DEEP_EP_VECTOR_BYTES first. Inlining a function into one with a wider instruction set would not
// work, since GCC splits the vectors before it inlines. No include guard; everything is internal to the including file.

#include "sim/vector/vector.h"

namespace deep_ep::cpu {
namespace {

template <unsigned kBytes>
struct Vector {
    typedef u32 Words __attribute__((vector_size(kBytes)));
    typedef float Floats __attribute__((vector_size(kBytes)));
};

#define DEEP_EP_INLINE DEEP_EP_TARGET __attribute__((always_inline)) inline

// Splits kBytes of bfloat16 into even and odd elements: each becomes a float by a shift or a mask, and the results are
// merged again without a shuffle.
template <unsigned kBytes, bool kWeighted = false>
DEEP_EP_INLINE void add(typename Vector<kBytes>::Floats& even, typename Vector<kBytes>::Floats& odd, const u8* from,
                        float weight = 1.0f) {
    using Floats = typename Vector<kBytes>::Floats;
    typename Vector<kBytes>::Words words;
    __builtin_memcpy(&words, from, kBytes);
    const Floats low = (Floats)(words << 16), high = (Floats)(words & 0xffff0000u);
    even += kWeighted ? low * weight : low;
    odd += kWeighted ? high * weight : high;
}

// Rounds to nearest even, into the upper half of each word. All NaNs become the one that CUDA's cvt.rn.bf16 returns:
// otherwise the result would depend on which of two NaN operands an instruction keeps.
template <unsigned kBytes>
DEEP_EP_INLINE void round(typename Vector<kBytes>::Words& rounded, const typename Vector<kBytes>::Floats& value) {
    using Words = typename Vector<kBytes>::Words;
    const Words bits = (Words)value;
    const Words is_nan = (Words)(value != value);
    rounded = ((bits + 0x7fffu + ((bits >> 16) & 1u)) & ~is_nan) | (is_nan & 0x7fff0000u);
}

// One pass over all rows, with `kUnroll` vectors of each in registers.
template <unsigned kBytes, unsigned kUnroll, bool kWeighted>
DEEP_EP_INLINE size_t sum_span(u8* dst, const u8* const* src, const float* weights, unsigned n, const u8* bias0,
                               const u8* bias1, size_t begin, size_t bytes) {
    using Words = typename Vector<kBytes>::Words;
    using Floats = typename Vector<kBytes>::Floats;
    constexpr size_t kStep = kBytes * kUnroll;
    // Rows come from as many places as there are ranks, and the hardware prefetcher stops at every page. What follows a
    // row is usually the row of the next token; otherwise the prefetch does no harm.
    constexpr size_t kAhead = 2048;
    size_t i = begin;
    for (; i + kStep <= bytes; i += kStep) {
        Floats even[kUnroll], odd[kUnroll];
        for (unsigned u = 0; u < kUnroll; ++u) even[u] = odd[u] = Floats{};
        for (unsigned k = 0; k < n; ++k) {
            const u8* row = src[k] + i;
            for (size_t line = 0; line < kStep; line += 64) __builtin_prefetch(row + kAhead + line);
            const float weight = kWeighted ? weights[k] : 1.0f;
            for (unsigned u = 0; u < kUnroll; ++u) {
                add<kBytes, kWeighted>(even[u], odd[u], row + u * kBytes, weight);
            }
        }
        for (unsigned u = 0; bias0 != nullptr && u < kUnroll; ++u) add<kBytes>(even[u], odd[u], bias0 + i + u * kBytes);
        for (unsigned u = 0; bias1 != nullptr && u < kUnroll; ++u) add<kBytes>(even[u], odd[u], bias1 + i + u * kBytes);
        for (unsigned u = 0; u < kUnroll; ++u) {
            Words low, high;
            round<kBytes>(low, even[u]);
            round<kBytes>(high, odd[u]);
            const Words packed = (low >> 16) | (high & 0xffff0000u);
            __builtin_memcpy(dst + i + u * kBytes, &packed, kBytes);
        }
    }
    return i;
}

template <bool kWeighted>
DEEP_EP_INLINE void sum_row(void* dst, const u8* const* src, const float* weights, unsigned n, const void* bias0,
                            const void* bias1, size_t elements) {
    auto* to = static_cast<u8*>(dst);
    const auto* first = static_cast<const u8*>(bias0);
    const auto* second = static_cast<const u8*>(bias1);
    const size_t bytes = elements * sizeof(u16);
    const size_t done = sum_span<DEEP_EP_VECTOR_BYTES, 2, kWeighted>(to, src, weights, n, first, second, 0, bytes);
    sum_span<16, 1, kWeighted>(to, src, weights, n, first, second, done, bytes);
}

DEEP_EP_TARGET void sum(void* dst, const u8* const* src, const float* weights, unsigned n, const void* bias0,
                        const void* bias1, size_t elements) {
    if (weights == nullptr) {
        sum_row<false>(dst, src, weights, n, bias0, bias1, elements);
    } else {
        sum_row<true>(dst, src, weights, n, bias0, bias1, elements);
    }
}

#undef DEEP_EP_INLINE

}  // namespace
}  // namespace deep_ep::cpu
