// How many rows a chunk has. Both ends compute it from what all ranks know: Buffer and shape.
#pragma once

#include <stdexcept>

#include "wire/messages.h"

namespace deep_ep::host {

// The most a chunk may hold. Small enough that the slots of all streams stay in a cache between the write and the read
// (on 2 cores with 8 ranks, combine through chunks took half as long as with 2 MiB), large enough to amortise the
// handshake and to be an efficient message of a NIC.
constexpr u32 kMaxChunkRows = 128;
constexpr u64 kMaxChunkBytes = 128 * 1024;
// The least a region must hold: kSlots chunks of one row per source (P9).
constexpr u32 kMinChunkRows = 1;

// The given layout with the most rows per chunk with which it fits into a region, and a chunk into one put.
inline wire::RegionLayout fit_chunks(wire::RegionLayout layout, uint64_t region_bytes, uint64_t most_put_bytes) {
    const uint64_t most = most_put_bytes < kMaxChunkBytes ? most_put_bytes : kMaxChunkBytes;
    layout.chunk_rows = kMaxChunkRows;
    while (layout.chunk_rows > kMinChunkRows && layout.chunk_bytes() > most) --layout.chunk_rows;
    while (layout.chunk_rows > kMinChunkRows && layout.bytes() > region_bytes) --layout.chunk_rows;
    if (layout.bytes() > region_bytes) {
        throw std::invalid_argument("a region does not hold one row per slot and source");
    }
    return layout;
}

}  // namespace deep_ep::host
