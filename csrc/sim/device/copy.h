// A warp's operations on whole rows. With DEEP_EP_COPY_PER_LANE every lane moves its own 16-byte pieces, so that
// schedules can interrupt a copy between any two of them and ThreadSanitizer sees which lane makes each access.
// Otherwise the first lane does everything as a vector operation. This is legal because a correct kernel has a warp
// barrier before any lane reads what the others wrote.
#pragma once

#include "device/bf16.h"
#include "sim/device/builtins.h"

#if !defined(DEEP_EP_COPY_PER_LANE)
#include "sim/vector/vector.h"
#endif

namespace deep_ep::device {

#if defined(DEEP_EP_COPY_PER_LANE)

typedef u64 Piece __attribute__((vector_size(16), may_alias));
constexpr u64 kPieceBytes = sizeof(Piece);

inline void warp_copy(void* dst, const void* src, u64 bytes) {
    auto* to = static_cast<Piece*>(dst);
    const auto* from = static_cast<const Piece*>(src);
    for (u64 i = lane(); i < bytes / kPieceBytes; i += kWarpSize) to[i] = from[i];
}

constexpr u32 kPieceElements = kPieceBytes / sizeof(u16);

inline void warp_copy_to_many(u8* const* dst, u32 n, const void* src, u64 bytes, bool) {
    const auto* from = static_cast<const Piece*>(src);
    for (u64 i = lane(); i < bytes / kPieceBytes; i += kWarpSize) {
        const Piece piece = from[i];
        for (u32 k = 0; k < n; ++k) reinterpret_cast<Piece*>(dst[k])[i] = piece;
    }
}

inline void add_piece(float (&sum)[kPieceElements], const void* row, u64 i, float weight = 1.0f) {
    const Piece piece = static_cast<const Piece*>(row)[i];
    u16 elements[kPieceElements];
    __builtin_memcpy(elements, &piece, sizeof(piece));
    for (u32 e = 0; e < kPieceElements; ++e) sum[e] += weight * bf16_to_float(elements[e]);
}

inline void sum_rows(void* dst, const u8* const* src, const float* weights, u32 n, const void* bias0, const void* bias1,
                     u64 elements) {
    for (u64 i = lane(); i < elements / kPieceElements; i += kWarpSize) {
        float sum[kPieceElements] = {};
        for (u32 k = 0; k < n; ++k) add_piece(sum, src[k], i, weights == nullptr ? 1.0f : weights[k]);
        if (bias0 != nullptr) add_piece(sum, bias0, i);
        if (bias1 != nullptr) add_piece(sum, bias1, i);
        u16 rounded[kPieceElements];
        for (u32 e = 0; e < kPieceElements; ++e) rounded[e] = float_to_bf16(sum[e]);
        Piece piece;
        __builtin_memcpy(&piece, rounded, sizeof(piece));
        static_cast<Piece*>(dst)[i] = piece;
    }
}

#else

inline void warp_copy(void* dst, const void* src, u64 bytes) {
    if (lane() == 0) cpu::copy(dst, src, bytes);
}

inline void warp_copy_to_many(u8* const* dst, u32 n, const void* src, u64 bytes, bool streaming) {
    if (lane() == 0) cpu::copy_to_many(dst, n, src, bytes, streaming);
}

inline void sum_rows(void* dst, const u8* const* src, const float* weights, u32 n, const void* bias0, const void* bias1,
                     u64 elements) {
    if (lane() == 0) cpu::sum_bf16(dst, src, weights, n, bias0, bias1, elements);
}

#endif

inline void warp_sum_bf16(void* dst, const u8* const* src, u32 n, const void* bias0, const void* bias1, u64 elements) {
    sum_rows(dst, src, nullptr, n, bias0, bias1, elements);
}

inline void warp_weighted_sum_bf16(void* dst, const u8* const* src, const float* weights, u32 n, u64 elements) {
    sum_rows(dst, src, weights, n, nullptr, nullptr, elements);
}

}  // namespace deep_ep::device
