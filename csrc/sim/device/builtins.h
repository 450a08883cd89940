// CUDA's keywords, variables and intrinsics, as far as kernels may use them. The source line of a call is passed as a
// default argument, so that a dump can name it.
#pragma once

#include <cstring>
#include <type_traits>

#include "sim/executor/builtin_variables.h"
#include "sim/executor/device_calls.h"
#include "wire/types.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#define DEEP_EP_DEVICE inline
#define DEEP_EP_DEVICE_CALL inline
#define DEEP_EP_KERNEL inline
#define DEEP_EP_ARGUMENT

namespace deep_ep::device {

constexpr u32 kWarpSize = cpu::kWarpWidth;
constexpr u32 kFullMask = 0xffffffffu >> (32 - kWarpSize);

inline u32 lane() { return threadIdx.x % kWarpSize; }
inline u32 warp() { return threadIdx.x / kWarpSize; }
inline u32 warps() { return (blockDim.x + kWarpSize - 1) / kWarpSize; }

namespace detail {

template <class T>
u64 to_bits(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "lanes exchange up to 8 bytes");
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T from_bits(u64 bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

// `source` is the lane to read from; outside the caller's segment of `width` lanes it means the caller itself.
template <class T>
T shuffle(u32 mask, T value, int source, int width, cpu::Site site) {
    if (kWarpSize == 1) return value;
    const int self = static_cast<int>(lane()), begin = self & ~(width - 1);
    if (source < begin || source >= begin + width) source = self;
    return from_bits<T>(
        cpu::collective(cpu::Collective::kShuffle, mask, to_bits(value), static_cast<u32>(source), site));
}

inline u32 vote(cpu::Collective operation, u32 mask, bool predicate, cpu::Site site) {
    if (kWarpSize == 1) return predicate;
    return static_cast<u32>(cpu::collective(operation, mask, predicate, 0, site));
}

}  // namespace detail
}  // namespace deep_ep::device

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    deep_ep::cpu::barrier(0, 0, false, {file, line});
}

inline int __syncthreads_or(int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return deep_ep::cpu::barrier(0, 0, predicate != 0, {file, line});
}

inline void __syncwarp(deep_ep::u32 mask = deep_ep::device::kFullMask, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
    if (deep_ep::device::kWarpSize == 1) return;
    deep_ep::cpu::collective(deep_ep::cpu::Collective::kSyncWarp, mask, 0, 0, {file, line});
}

template <class T>
T __shfl_sync(deep_ep::u32 mask, T value, int source, int width = deep_ep::device::kWarpSize,
              const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const int begin = static_cast<int>(deep_ep::device::lane()) & ~(width - 1);
    return deep_ep::device::detail::shuffle(mask, value, begin + (source & (width - 1)), width, {file, line});
}

template <class T>
T __shfl_up_sync(deep_ep::u32 mask, T value, unsigned delta, int width = deep_ep::device::kWarpSize,
                 const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const int source = static_cast<int>(deep_ep::device::lane()) - static_cast<int>(delta);
    return deep_ep::device::detail::shuffle(mask, value, source, width, {file, line});
}

template <class T>
T __shfl_xor_sync(deep_ep::u32 mask, T value, int lane_mask, int width = deep_ep::device::kWarpSize,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const int source = static_cast<int>(deep_ep::device::lane()) ^ lane_mask;
    return deep_ep::device::detail::shuffle(mask, value, source, width, {file, line});
}

inline unsigned __ballot_sync(deep_ep::u32 mask, int predicate, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
    return deep_ep::device::detail::vote(deep_ep::cpu::Collective::kBallot, mask, predicate, {file, line});
}

inline int __any_sync(deep_ep::u32 mask, int predicate, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
    return deep_ep::device::detail::vote(deep_ep::cpu::Collective::kAny, mask, predicate, {file, line});
}

inline int __all_sync(deep_ep::u32 mask, int predicate, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
    return deep_ep::device::detail::vote(deep_ep::cpu::Collective::kAll, mask, predicate, {file, line});
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <class T>
constexpr T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
    return a < b ? b : a;
}
