#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "sim/vector/vector.h"

// Measured on 2 cores of a Zen 5 server: 14336-byte rows to 5.25 of 8 destinations each, 4096 tokens per rank, GB/s
// written.
//
//   one rank, cold rows    memcpy or rep movsb 34; streaming, one destination after the other, 56 to 66
//   the same in pieces     512 B 64, 1 KiB 74, 2 KiB 74, 4 KiB 72, 7 KiB 67
//   vectors in 1 KiB       64 bytes 75, 32 bytes 74, 16 bytes 73: one version is enough
//   prefetching a piece    -4 %
//   a fence per copy       -10 %
//   8 ranks on 2 cores     memcpy 39; streaming 52 to 57 however it is done: the limit of the memory
//   8 ranks, few tokens    all rows together 38 MB: memcpy 2x faster; 77 to 150 MB: equal; above: streaming 1.4x
namespace deep_ep::cpu {
namespace {

// Source bytes that are copied to every destination before the next are read, so that all reads but the first hit L1.
constexpr size_t kPieceBytes = 1024;

// An empty row may have a null address, which memcpy does not allow.
void copy_bytes(u8* dst, const u8* src, size_t bytes) {
    if (bytes != 0) std::memcpy(dst, src, bytes);
}

#if defined(__SSE2__)

void stream(u8* dst, const u8* src, size_t bytes) {
    const size_t head = std::min(bytes, static_cast<size_t>(-reinterpret_cast<uintptr_t>(dst) & 15));
    copy_bytes(dst, src, head);
    size_t i = head;
    for (; i + 64 <= bytes; i += 64) {
        const auto* from = reinterpret_cast<const __m128i*>(src + i);
        auto* to = reinterpret_cast<__m128i*>(dst + i);
        const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    for (; i + 16 <= bytes; i += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
    }
    copy_bytes(dst + i, src + i, bytes - i);
}

void stream_fence() { _mm_sfence(); }

#else

// The caches of other CPUs detect streaming stores themselves, and plain stores need no fence.
void stream(u8* dst, const u8* src, size_t bytes) { copy_bytes(dst, src, bytes); }
void stream_fence() {}

#endif

// Size of this machine's last-level cache. In a virtual machine the C library may report all caches of the host.
size_t last_level_cache() {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    size_t kilobytes = 0;
    if (file >> kilobytes && kilobytes != 0) return kilobytes << 10;  // as "32768K"
    const long last_level = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return last_level > 0 ? static_cast<size_t>(last_level) : size_t{32} << 20;
}

}  // namespace

void copy(void* dst, const void* src, size_t bytes) {
    copy_bytes(static_cast<u8*>(dst), static_cast<const u8*>(src), bytes);
}

void stream_rows(u8* const* dst, const u8* const* src, size_t n, size_t row_bytes) {
    for (size_t i = 0; i < n; ++i) stream(dst[i], src[i], row_bytes);
    stream_fence();
}

void copy_to_many(u8* const* dst, unsigned n, const void* src, size_t bytes, bool streaming) {
    const auto* from = static_cast<const u8*>(src);
    if (!streaming) {
        for (unsigned k = 0; k < n; ++k) copy_bytes(dst[k], from, bytes);
        return;
    }
    for (size_t begin = 0; begin < bytes; begin += kPieceBytes) {
        const size_t piece = std::min(kPieceBytes, bytes - begin);
        for (unsigned k = 0; k < n; ++k) stream(dst[k] + begin, from + begin, piece);
    }
    stream_fence();
}

size_t streaming_threshold() {
    static const size_t threshold = 3 * last_level_cache();
    return threshold;
}

}  // namespace deep_ep::cpu
