// Arguments of the two-hop dispatch kernel, and the layout of a block's shared memory.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/shape.h"
#include "kernels/normal/rows.h"
#include "kernels/normal/staging.h"
#include "kernels/two_hops/offers.h"

namespace deep_ep::two_hops {

// The receiver's record of where a row comes from.
struct RowSource {
    i32 token;     // index at the source
    i32 node_row;  // index in the source's row stream to this node
};
static_assert(sizeof(RowSource) == sizeof(u64), "a RowSource must have the size of a handle's element");

// Where rows are stored: an output, starting at its first row, or the parts of a chunk. A pointer is null if rows have
// no such part.
struct RowTargets {
    u8* x;
    u32* scales;
    ExpertIds topk_idx;
    float* topk_weights;
    RowSource* source;
};

// Copied at launch. Pointers are device pointers.
struct DispatchArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::TwoHopLayout layout;
    u64 arguments;  // if it is the first: hash of what all ranks must agree on
    u32 first;      // of the kernels of its operation: the counts are known, and the table is written
    u32 tokens;
    u32 experts_per_rank;
    u32 streaming;  // rows are stored bypassing the caches
    u32 rows;       // of the output: as many as arrive, or more
    Rows from;      // parts of the tokens' rows
    Plan plan;
    wire::Offer offer;  // where the output is, if peers can see it
    RowTargets output;  // [rows]
};

struct DispatchShared {
    SharedArray<u8> copies;
    SharedArray<RowTargets> targets;  // of each rank of the node; x is null if it gets local chunks
    SharedArray<wire::StreamRows>
        ranges;  // [per_node, lines] where each rank of the node has the rows of this rank's lines
    SharedArray<Received> received;
    SharedArray<Stream> streams;
    SharedArray<u8*> row_addresses;  // per warp: the rows that one node row is copied to
    SharedArray<u32> row_ranks;
    SharedArray<u32> row_numbers;
    SharedArray<u32> next_rows;   // per warp: the index of the next row for each rank
    SharedArray<u32> first_rows;  // and of the first one of a chunk
    SharedArray<u32> chunk_rows;  // and the number of the chunk's rows for each rank that gets local chunks
    SharedArray<u32> turns;
    SharedArray<RowRange> range;  // of the local chunk whose turn it is
    u32 bytes;

    constexpr explicit DispatchShared(const BlockSizes& block, SharedCut cut = {})
        : copies(cut.take<u8>(block.warps * block.copies_bytes)),
          targets(cut.take<RowTargets>(block.per_node)),
          ranges(cut.take<wire::StreamRows>(block.ranks * wire::kRoles)),
          received(cut.take<Received>(block.ranks)),
          streams(cut.take<Stream>(nodes(block) * wire::kRoles)),
          row_addresses(cut.take<u8*>(block.warps * block.per_node)),
          row_ranks(cut.take<u32>(block.warps * block.per_node)),
          row_numbers(cut.take<u32>(block.warps * block.per_node)),
          next_rows(cut.take<u32>(block.warps * block.per_node)),
          first_rows(cut.take<u32>(block.warps * block.per_node)),
          chunk_rows(cut.take<u32>(block.warps * block.per_node)),
          turns(cut.take<u32>(Turns::words(entries(block.ranks, block.per_node, wire::kRoles) + 1))),
          range(cut.take<RowRange>(1)),
          bytes(cut.end()) {}

    static constexpr u32 nodes(const BlockSizes& block) { return block.ranks / block.per_node; }
    static constexpr u32 sending(u32 ranks, u32 per_node) { return (ranks / per_node - 1) * wire::kSlots; }
    static constexpr u32 forwarding(u32 ranks, u32 per_node, u32 roles) { return roles * sending(ranks, per_node); }
    static constexpr u32 placing(u32 ranks) { return ranks * wire::kLocalSlots; }
    // Slots of row streams to and from other nodes, and of local chunks to be placed.
    static constexpr u32 entries(u32 ranks, u32 per_node, u32 roles) {
        return sending(ranks, per_node) + forwarding(ranks, per_node, roles) + placing(ranks);
    }
};

// A block's tables, in shared memory: see DispatchShared.
struct DispatchTables {
    RowTargets* targets;
    wire::StreamRows* ranges;
    Received* received;
    Stream* streams;
};

DEEP_EP_DEVICE bool gets_local_chunks(const DispatchTables& tables, const Place& me, u32 local) {
    return me.has(local) && tables.targets[local].x == nullptr;
}

// What rows carry is the same on all ranks.
DEEP_EP_DEVICE bool carries_topk(const DispatchArgs& args) { return args.layout.rail.has_topk(); }
DEEP_EP_DEVICE bool carries_source(const DispatchArgs& args) { return args.layout.rail.src_idx_bytes != 0; }

// The parts of a chunk of `rows` rows.
DEEP_EP_DEVICE Rows rows_in(const u8* message, const wire::ChunkFormat& format, u32 rows, u32 id_bytes) {
    return {message + format.x_offset(),
            reinterpret_cast<const u32*>(message + format.scales_offset(rows)),
            {static_cast<i64>(scales_per_row(format)), 1},
            format.scales_bytes % wire::kPieceBytes == 0,
            ExpertIds::at(message + format.topk_idx_offset(rows), id_bytes),
            reinterpret_cast<const float*>(message + format.topk_weights_offset(rows))};
}
DEEP_EP_DEVICE RowTargets targets_in(u8* message, const wire::ChunkFormat& format, u32 rows, u32 id_bytes) {
    return {message + format.x_offset(), reinterpret_cast<u32*>(message + format.scales_offset(rows)),
            ExpertIds::at(message + format.topk_idx_offset(rows), id_bytes),
            reinterpret_cast<float*>(message + format.topk_weights_offset(rows)),
            reinterpret_cast<RowSource*>(message + format.src_idx_offset(rows))};
}

// One thread.
DEEP_EP_DEVICE void store_chunk_header(const Operation& op, u8* message, u32 first, u32 rows) {
    wire::ChunkHeader header{};
    header.operation = op.number();
    header.arguments = op.arguments();
    header.first = first;
    header.rows = rows;
    *reinterpret_cast<wire::ChunkHeader*>(message) = header;
}

// The first warp: sends a chunk that has been built at `source` in this rank's heap or, if the peer's heap is mapped,
// at `target` in that heap. The block has met since, and the first lane has stored the header. Not inlined: several
// places need it.
DEEP_EP_DEVICE_CALL void send_chunk(Operation& op, u32 to, u32 slot, u64 source, u64 target, u64 bytes) {
    if (fabric::mapped(op.peers(), to)) {
        if (device::lane() == 0) op.signal(to, wire::kChunk + slot);
    } else {
        const fabric::Piece piece{source, target, bytes};
        op.put_signal(to, wire::kChunk + slot, &piece, 1);
    }
}
// Returns where that chunk is built.
DEEP_EP_DEVICE u8* chunk_to_send(const Operation& op, u32 to, u64 source, u64 target) {
    return fabric::mapped(op.peers(), to) ? fabric::address(op.peers(), to, target) : op.peers().local + source;
}

}  // namespace deep_ep::two_hops
