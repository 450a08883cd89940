// The number of rows per chunk. Both ends compute it from data that all ranks share: the Buffer and the shape.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "wire/two_hops.h"

namespace deep_ep::host {

// Of rows that are short; of others, Launcher::chunks() allows fewer.
constexpr u32 kMaxChunkRows = 128;
// With two hops a rank has few row streams, and each chunk is passed from one process to the next (on 2 cores with 8
// ranks, 2 nodes: dispatch took 8 to 15 % less time than with 128 KiB).
constexpr u64 kMaxRailChunkBytes = 512 * 1024;
// Minimum capacity of a region: kSlots chunks of one row per source (P9).
constexpr u32 kMinChunkRows = 1;

// Returns the given layout with the largest number of rows per chunk for which it fits into a region, and a chunk into
// `most` bytes.
inline wire::RegionLayout fit_chunks(wire::RegionLayout layout, uint64_t region_bytes, uint64_t most) {
    layout.chunk_rows = kMaxChunkRows;
    while (layout.chunk_rows > kMinChunkRows && layout.chunk_bytes() > most) --layout.chunk_rows;
    while (layout.chunk_rows > kMinChunkRows && layout.bytes() > region_bytes) --layout.chunk_rows;
    if (layout.bytes() > region_bytes) {
        throw std::invalid_argument("a region does not hold one row per slot and source");
    }
    return layout;
}

// The same for two hops, with the smallest number of rows per chunk that keeps a NIC busy, or `least_rows`.
// `bytes_in_flight`, the NIC's bandwidth times the time from a put to the `next` that answers it, must be in flight at
// once. The slots of all of its row streams share them. More rows would only make the first row of a chunk wait for the
// last, and cost memory. The formula is available to callers as Link.staging() of
// deep_ep_py/transport/topology/link.py.
inline wire::TwoHopLayout fit_chunks(wire::TwoHopSizes sizes, uint64_t region_bytes, uint64_t max_put_bytes,
                                     uint64_t bytes_in_flight, u32 least_rows) {
    const uint64_t slots = uint64_t{wire::kSlots} * (sizes.nodes > 1 ? sizes.others() : 1);
    const uint64_t row = sizes.rail_bytes(1) - sizeof(wire::ChunkHeader);
    const uint64_t wanted = std::max<uint64_t>((bytes_in_flight - 1) / (slots * row) + 1, least_rows);
    const uint64_t most = max_put_bytes < kMaxRailChunkBytes ? max_put_bytes : kMaxRailChunkBytes;
    const auto bytes = [&] { return wire::TwoHopLayout::of(sizes).bytes; };
    sizes.chunk_rows = static_cast<u32>(wanted < kMaxChunkRows ? wanted : kMaxChunkRows);
    while (sizes.chunk_rows > kMinChunkRows && sizes.rail_bytes(sizes.chunk_rows) > most) --sizes.chunk_rows;
    while (sizes.chunk_rows > kMinChunkRows && bytes() > region_bytes) --sizes.chunk_rows;
    if (bytes() > region_bytes) throw std::invalid_argument("a region does not hold one row per slot and stream");
    return wire::TwoHopLayout::of(sizes);
}

}  // namespace deep_ep::host
