// What the build decides for the executor: the width of a warp and the sanitizer in use.
#pragma once

#ifndef DEEP_EP_WARP
#define DEEP_EP_WARP 1
#endif
#ifndef DEEP_EP_TSAN
#define DEEP_EP_TSAN 0
#endif

#if defined(__SANITIZE_ADDRESS__)
#define DEEP_EP_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DEEP_EP_ASAN 1
#endif
#endif
#ifndef DEEP_EP_ASAN
#define DEEP_EP_ASAN 0
#endif

namespace deep_ep::cpu {

// 32: one fiber per CUDA thread, as on a GPU. 1: one fiber per warp, the same source run fast. Between: fewer threads
// than on a GPU, but with all their races (ThreadSanitizer tells at most 255 threads apart).
constexpr unsigned kWarpWidth = DEEP_EP_WARP;
static_assert(kWarpWidth <= 32 && (kWarpWidth & (kWarpWidth - 1)) == 0, "a warp has 1, 2, 4, 8, 16 or 32 lanes");

// The exact builds look for bugs and may pay for it: poisoned shared memory, scope checks.
constexpr bool kExact = kWarpWidth > 1;
constexpr unsigned char kPoison = 0xA5;  // what shared memory is filled with, so that a read before any write shows
constexpr bool kTsan = DEEP_EP_TSAN;
constexpr bool kAsan = DEEP_EP_ASAN;

}  // namespace deep_ep::cpu
