// Build options of the executor: the warp width and the sanitizer in use.
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

// 32: one fiber per CUDA thread, as on a GPU. 1: one fiber per warp, which runs the same source fast. In between: fewer
// threads than on a GPU, but with all their races (ThreadSanitizer can distinguish at most 255 threads).
constexpr unsigned kWarpWidth = DEEP_EP_WARP;
static_assert(kWarpWidth <= 32 && (kWarpWidth & (kWarpWidth - 1)) == 0, "a warp has 1, 2, 4, 8, 16 or 32 lanes");

// The exact builds trade speed for checks: poisoned shared memory, scope checks.
constexpr bool kExact = kWarpWidth > 1;
constexpr unsigned char kPoison = 0xA5;  // fills shared memory, so that a read before any write shows
constexpr bool kTsan = DEEP_EP_TSAN;
constexpr bool kAsan = DEEP_EP_ASAN;

}  // namespace deep_ep::cpu
