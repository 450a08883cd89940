// dispatch: every token's row goes to every rank that holds one of its experts.
//
// If the receiver has offered its output, rows are stored directly into their final places: one row per token, or, if
// it has offered an expanded layout, the place of the token's first choice there (the receiver copies it to the
// others). Otherwise they are sent in chunks through the receiver's region, and the receiver places them. The waits, in
// this order so that no cycle can form (P11):
//
//   free of every rank      given at the end of an earlier operation
//   offers of mapped ranks  sent right after `free`, with no other wait in between
//   chunk, next             polled by blocks that serve many row streams and block on none
//   data                    follows the senders' direct stores, which wait for nothing but offers
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"
#include "kernels/common/shape.h"
#include "kernels/normal/offers.h"
#include "kernels/normal/rows.h"
#include "kernels/normal/staging.h"

namespace deep_ep {

// Copied at launch. Pointers are device pointers.
struct DispatchArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::RegionLayout layout;
    u64 arguments;  // if it is the first: hash of what all ranks must agree on
    u32 first;      // of the kernels of its operation: the counts are known
    u32 tokens;
    u32 experts_per_rank;
    u32 streaming;  // rows are stored bypassing the caches
    u32 rows;       // of the output: as many as arrive, or more
    Rows from;      // parts of the tokens' rows
    // [tokens, topk] index of a choice among this rank's choices of the same expert; null: no layout is made by senders
    const i32* ordinals;
    Plan plan;
    wire::Offer offer;         // where the output is, if peers can see it
    u8* recv_x;                // [rows, row_bytes]
    u32* recv_scales;          // [rows, scales]
    ExpertIds recv_topk_idx;   // [rows, topk] local expert ids, -1: not on this rank
    float* recv_topk_weights;  // [rows, topk]
    i32* recv_src_idx;         // [rows, source_words] token index at the source; null in cached dispatch
    u32 source_words;          // 1, or 2: followed by the row's index among those of its source
};

// Per-rank state of a block in dynamic shared memory.
struct DispatchTarget {
    u8* x;  // where this rank's first row goes; null if rows go in chunks
    u32* scales;
    u8* topk_idx;
    float* topk_weights;
    i32* src_idx;
    const u32* starts;  // where this rank's rows of each expert begin in the expanded layout
    u32 expanded_rows;  // of that layout, whose beginning `x` then is, while `topk_idx` takes slots; 0: there is none
    u32 sent_rows;      // number of rows for that rank
    RowRange received;  // rows from it, among this rank's
};

// Per warp: the destination rows of one token.
struct DispatchRows {
    u8** x;     // [ranks]
    u32* rank;  // [ranks]
    u32* row;   // [ranks] index among this rank's rows at the destination
};

struct DispatchShared {
    SharedArray<u8> copies;
    SharedArray<DispatchTarget> targets;
    SharedArray<u8*> row_addresses;
    SharedArray<u32> row_ranks;
    SharedArray<u32> row_numbers;
    SharedArray<u32> turns;
    SharedArray<RowRange> range;  // of the chunk whose turn it is
    u32 bytes;

    constexpr explicit DispatchShared(const BlockSizes& block, SharedCut cut = {})
        : copies(cut.take<u8>(block.warps * block.copies_bytes)),
          targets(cut.take<DispatchTarget>(block.ranks)),
          row_addresses(cut.take<u8*>(block.warps * block.ranks)),
          row_ranks(cut.take<u32>(block.warps * block.ranks)),
          row_numbers(cut.take<u32>(block.warps * block.ranks)),
          turns(cut.take<u32>(Turns::words(stream_entries(block.ranks, true)))),
          range(cut.take<RowRange>(1)),
          bytes(cut.end()) {}
};

// What rows carry. The same on all ranks, since a rank without rows of its own has null addresses for them.
DEEP_EP_DEVICE bool carries_topk(const DispatchArgs& args) { return args.layout.format.has_topk(); }
DEEP_EP_DEVICE bool carries_src_idx(const DispatchArgs& args) { return args.layout.format.src_idx_bytes != 0; }

// One thread: notes where a row comes from. `index`: among the rows of its source.
DEEP_EP_DEVICE void store_source(const DispatchArgs& args, i32* src_idx, u64 row, i32 token, u32 index) {
    src_idx[row * args.source_words] = token;
    if (args.source_words == 2) src_idx[row * 2 + 1] = static_cast<i32>(index);
}

// The block: finds where this rank's rows begin at each destination.
template <class Shape>
DEEP_EP_DEVICE bool find_targets(const DispatchArgs& args, Operation& op, const Shape& shape, DispatchTarget* targets) {
    const u32 ranks = shape.ranks(), topk = shape.topk();
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        DispatchTarget target{};
        RowRange sent;
        const bool planned = planned_rows(op, args.plan, op.rank(), r, args.tokens, sent) &&
                             planned_rows(op, args.plan, r, op.rank(), args.rows, target.received);
        target.sent_rows = sent.rows;
        if (!op.present(r) && (sent.rows | target.received.rows) != 0) {
            // The plan is of a generation in which that rank took part: that of a captured call.
            op.fail(wire::kOutdated, Phase::kMask, static_cast<i32>(r), 0, 0);
        }
        wire::Offer offer;
        const bool numbered = args.ordinals != nullptr || args.tokens == 0;
        const u32 slot_bytes = numbered ? topk * static_cast<u32>(sizeof(u32)) : 0;
        if (planned && await_offer(args.layout, op, r, sent, slot_bytes, args.source_words, offer)) {
            const u64 start = sent.first;
            u8* heap = fabric::address(op.peers(), r, 0);
            target.expanded_rows = offer.expanded_rows;
            target.starts = reinterpret_cast<const u32*>(op.local_region() + args.layout.starts(r));
            target.x = heap + offer.x + (offer.expanded_rows == 0 ? start * shape.row_bytes() : 0);
            target.scales = reinterpret_cast<u32*>(heap + offer.scales) + start * scales_per_row(args.layout.format);
            const u32 idx_bytes = offer.expanded_rows == 0 ? args.layout.format.topk_idx_bytes : slot_bytes;
            target.topk_idx = heap + offer.topk_idx + start * idx_bytes;
            target.topk_weights = reinterpret_cast<float*>(heap + offer.topk_weights) + start * topk;
            target.src_idx = reinterpret_cast<i32*>(heap + offer.src_idx) + start * args.source_words;
        }
        if (target.received.first + u64{target.received.rows} > args.rows) {
            op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), args.rows,
                    target.received.first + u64{target.received.rows});
        }
        targets[r] = target;
    }
    return op.sync_block();
}

// One thread: the slot of a token's k-th choice in a rank's expanded layout; `expanded_rows` or more if its expert is
// elsewhere. The starts were acquired with the offer (find_targets()), and the block has synchronized since.
DEEP_EP_DEVICE u32 slot_of(const DispatchArgs& args, Operation& op, const DispatchTarget& target, u32 r, u64 choice) {
    const i64 local = args.from.topk_idx.get(choice) - static_cast<i64>(r) * args.experts_per_rank;
    if (static_cast<u64>(local) >= args.experts_per_rank) return ~0u;
    const u32 slot = device::read_once(target.starts[local]) + static_cast<u32>(args.ordinals[choice]);
    if (slot < target.expanded_rows) return slot;
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), target.expanded_rows, slot);
    return ~0u;
}

// One thread: where a token's row goes at a rank. Null if its choices are none of that rank's, against the plan.
DEEP_EP_DEVICE u8* place_of(const DispatchArgs& args, Operation& op, const DispatchTarget& target, u32 r, u32 token,
                            u32 topk, u32 row, u32 row_bytes) {
    if (target.expanded_rows == 0) return target.x + u64{row} * row_bytes;
    for (u32 k = 0; k < topk; ++k) {
        const u32 slot = slot_of(args, op, target, r, u64{token} * topk + k);
        if (slot < target.expanded_rows) return target.x + u64{slot} * row_bytes;
    }
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), target.sent_rows, row);
    return nullptr;
}

// A warp: stores the slots of a token's choices, and their weights, at a rank whose layout is expanded.
DEEP_EP_DEVICE void store_slots(const DispatchArgs& args, Operation& op, const DispatchTarget& target, u32 r, u32 token,
                                u32 topk, u64 to) {
    auto* const slots = reinterpret_cast<u32*>(target.topk_idx) + to;
    for (u32 k = device::lane(); k < topk; k += device::kWarpSize) {
        const u32 slot = slot_of(args, op, target, r, u64{token} * topk + k);
        slots[k] = slot;  // ~0u, as a number with a sign, is -1
        if (!args.layout.format.has_weights()) continue;
        target.topk_weights[to + k] =
            slot < target.expanded_rows ? args.from.topk_weights[u64{token} * topk + k] : 0.0f;
    }
}

// A warp: stores a share of the tokens directly into the outputs. It iterates over tokens, not destinations, so that a
// row is read once while all its copies are written.
template <class Shape>
DEEP_EP_DEVICE void store_tokens(const DispatchArgs& args, Operation& op, const Shape& shape,
                                 const DispatchTarget* targets, DispatchRows rows, device::RowCopies& copies) {
    const u32 ranks = shape.ranks(), row_bytes = shape.row_bytes(), topk = shape.topk();
    const u32 warps = gridDim.x * device::warps(), warp = blockIdx.x * device::warps() + device::warp();
    const u32 first = static_cast<u32>(static_cast<u64>(args.tokens) * warp / warps);
    const u32 end = static_cast<u32>(static_cast<u64>(args.tokens) * (warp + 1) / warps);
    const u32 lanes_below = (1u << device::lane()) - 1;
    const auto row_of = [&](u32 token) { return args.from.x + static_cast<u64>(token) * row_bytes; };
    bool stores = false;  // there is a rank that rows are stored at
    for (u32 r = device::lane(); r < ranks; r += device::kWarpSize) stores = stores || targets[r].x != nullptr;
    if (__any_sync(device::kFullMask, stores) == 0) return;
    if (first < end) copies.load(row_of(first), row_bytes);
    for (u32 token = first; token < end; ++token) {
        // The next row is loaded while this one's other parts are stored and the next one's places are found.
        if (token + 1 < end) copies.load(row_of(token + 1), row_bytes);
        const i32* token_row = args.plan.token_row + static_cast<u64>(token) * ranks;
        u32 count = 0;
        for (u32 base = 0; base < ranks; base += device::kWarpSize) {
            const u32 r = base + device::lane();
            const i32 row = r < ranks && targets[r].x != nullptr ? planned_row(token_row, r) : -1;
            bool goes = row >= 0 && static_cast<u32>(row) < targets[r].sent_rows;
            if (row >= 0 && !goes) {
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), targets[r].sent_rows,
                        static_cast<u32>(row));
            }
            u8* const place =
                goes ? place_of(args, op, targets[r], r, token, topk, static_cast<u32>(row), row_bytes) : nullptr;
            goes = place != nullptr;
            const u32 mask = __ballot_sync(device::kFullMask, goes);
            if (goes) {
                const u32 slot = count + __popc(mask & lanes_below);
                rows.x[slot] = place;
                rows.rank[slot] = r;
                rows.row[slot] = static_cast<u32>(row);
            }
            count += __popc(mask);
        }
        __syncwarp();  // the list is complete
        copies.to_many(rows.x, count, row_of(token), row_bytes, args.streaming != 0);
        for (u32 i = 0; scales_per_row(args.layout.format) != 0 && i < count; ++i) {
            const u64 to = static_cast<u64>(rows.row[i]) * scales_per_row(args.layout.format);
            store_scales(args.from, args.layout.format, token, targets[rows.rank[i]].scales + to);
        }
        for (u32 i = 0; carries_topk(args) && i < count; ++i) {
            const DispatchTarget& target = targets[rows.rank[i]];
            const u64 to = static_cast<u64>(rows.row[i]) * topk;
            if (target.expanded_rows != 0) {
                store_slots(args, op, target, rows.rank[i], token, topk, to);
                continue;
            }
            store_topk(args.from, args.layout.format, args.experts_per_rank, topk, token, rows.rank[i],
                       ExpertIds::at(target.topk_idx, args.from.topk_idx.id_bytes).from(to), target.topk_weights + to);
        }
        for (u32 i = device::lane(); carries_src_idx(args) && i < count; i += device::kWarpSize) {
            store_source(args, targets[rows.rank[i]].src_idx, rows.row[i], static_cast<i32>(token), rows.row[i]);
        }
        __syncwarp();  // the list has been read
    }
    copies.finish();
}

// Fills and places the chunks of dispatch. See staging.h for the traffic.
template <class Shape>
struct DispatchChunks {
    static constexpr bool kReceives = true;
    const DispatchArgs& args;
    Operation& op;
    const DispatchTarget* targets;
    Shape shape;
    device::RowCopies& copies;

    // A row stream without rows still sends one chunk, its header (P7).
    DEEP_EP_DEVICE u32 chunks(u32 rows) const {
        const u32 chunks = wire::ceil_div(rows, args.layout.chunk_rows);
        return chunks != 0 ? chunks : 1;
    }
    DEEP_EP_DEVICE u32 sent_chunks(u32 to) const { return chunks(targets[to].sent_rows); }
    DEEP_EP_DEVICE u32 received_chunks(u32 from) const { return chunks(targets[from].received.rows); }

    // Rows of a chunk in a row stream of `rows` rows.
    DEEP_EP_DEVICE RowRange part(u32 chunk, u32 rows) const {
        const u32 first = chunk * args.layout.chunk_rows, left = rows - first;
        return {first, left < args.layout.chunk_rows ? left : args.layout.chunk_rows};
    }
    // A warp: stores which of this rank's rows for `to` belong in a chunk.
    DEEP_EP_DEVICE bool find_rows(u32 to, u32 chunk, RowRange& range) const {
        if (device::lane() == 0) range = part(chunk, targets[to].sent_rows);
        return true;
    }
    // Which of the rows from `from` belong in a chunk.
    DEEP_EP_DEVICE RowRange due_rows(u32 from, u32 chunk) const { return part(chunk, targets[from].received.rows); }

    // The token whose row is the i-th of `tokens`. A token out of range fails the operation and is never read.
    DEEP_EP_DEVICE u32 token_at(const i32* tokens, u32 i, u32 to) const {
        const u32 token = static_cast<u32>(*const_cast<const volatile i32*>(tokens + i));
        if (token < args.tokens) return token;
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(to), args.tokens, token);
        return 0;
    }

    // Each warp of a block: writes its part of the rows that follow the header at `message`.
    DEEP_EP_DEVICE void fill(u8* message, u32 to, const RowRange& range) {
        const wire::ChunkFormat& format = args.layout.format;
        const u32 topk = shape.topk(), row_bytes = shape.row_bytes(), rows = range.rows;
        const i32* tokens = args.plan.row_token + static_cast<u64>(to) * args.tokens + range.first;
        auto* scales = reinterpret_cast<u32*>(message + format.scales_offset(rows));
        const auto idx = ExpertIds::at(message + format.topk_idx_offset(rows), args.from.topk_idx.id_bytes);
        auto* weights = reinterpret_cast<float*>(message + format.topk_weights_offset(rows));
        auto* src_idx = reinterpret_cast<i32*>(message + format.src_idx_offset(rows));
        copy_rows(
            copies, rows, row_bytes, false,
            [&](u32 i) { return args.from.x + u64{token_at(tokens, i, to)} * row_bytes; },
            [&](u32 i) { return message + format.x_offset() + u64{i} * row_bytes; });
        for (u32 i = device::warp(); i < rows; i += device::warps()) {
            const u32 token = token_at(tokens, i, to);
            if (scales_per_row(format) != 0)
                store_scales(args.from, format, token, scales + i * scales_per_row(format));
            if (!carries_topk(args)) continue;
            store_topk(args.from, format, args.experts_per_rank, topk, token, to, idx.from(i * topk),
                       weights + i * topk);
        }
        for (u32 i = threadIdx.x; carries_src_idx(args) && i < rows; i += blockDim.x) src_idx[i] = tokens[i];
    }

    // Each warp of a block: places its part of a chunk's rows in this rank's output.
    DEEP_EP_DEVICE void place(const u8* message, u32 from, const RowRange& range) {
        const wire::ChunkFormat& format = args.layout.format;
        const u32 topk = shape.topk(), row_bytes = shape.row_bytes(), first = range.first, rows = range.rows;
        const u64 start = u64{first} + targets[from].received.first;
        const auto* scales = reinterpret_cast<const u32*>(message + format.scales_offset(rows));
        const auto idx = ExpertIds::at(message + format.topk_idx_offset(rows), args.from.topk_idx.id_bytes);
        const auto* weights = reinterpret_cast<const float*>(message + format.topk_weights_offset(rows));
        const auto* src_idx = reinterpret_cast<const i32*>(message + format.src_idx_offset(rows));
        copy_rows(
            copies, rows, row_bytes, args.streaming != 0,
            [&](u32 i) { return message + format.x_offset() + u64{i} * row_bytes; },
            [&](u32 i) { return args.recv_x + (start + i) * row_bytes; });
        for (u32 i = threadIdx.x; i < rows * scales_per_row(format); i += blockDim.x) {
            args.recv_scales[start * scales_per_row(format) + i] = scales[i];
        }
        for (u32 i = threadIdx.x; carries_topk(args) && i < rows * topk; i += blockDim.x) {
            args.recv_topk_idx.set(start * topk + i, idx.get(i));
            if (format.has_weights()) args.recv_topk_weights[start * topk + i] = weights[i];
        }
        for (u32 i = threadIdx.x; carries_src_idx(args) && i < rows; i += blockDim.x) {
            store_source(args, args.recv_src_idx, start + i, src_idx[i], first + i);
        }
    }
};

// Works with any grid size. Blocks consist of whole warps.
template <class Shape>
DEEP_EP_KERNEL void dispatch(DEEP_EP_ARGUMENT const DispatchArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    const auto shape = Shape::of(args.shape);
    const u32 ranks = shape.ranks(), warps = device::warps();
    // The first kernel of its operation, if the counts were known before; otherwise notify is.
    const bool enters = args.first != 0 ? op.enter_and_begin(wire::Kind::kCachedDispatch, args.arguments, ranks)
                                        : op.enter() && op.await_free();
    if (!enters) return;

    const DispatchShared at({ranks, 0, shape.topk(), warps, device::RowCopies::kSharedBytes});
    auto* targets = at.targets.in(shared);
    auto* row_addresses = at.row_addresses.in(shared);
    auto* row_ranks = at.row_ranks.in(shared);
    auto* row_numbers = at.row_numbers.in(shared);
    const u32 own_rows = device::warp() * ranks;

    if (blockIdx.x == 0) send_offers(args.layout, args.offer, op, ranks);
    if (!find_targets(args, op, shape, targets)) return;
    op.ended(Stage::kOffers);
    const RowRange last = targets[ranks - 1].received;
    blank_unused_rows(args.recv_topk_idx, args.recv_topk_weights, u64{last.first} + last.rows, args.rows, shape.topk());
    device::RowCopies copies(at.copies.in(shared) + device::warp() * device::RowCopies::kSharedBytes);
    store_tokens(args, op, shape, targets, {row_addresses + own_rows, row_ranks + own_rows, row_numbers + own_rows},
                 copies);
    op.ended(Stage::kStore);

    // The rows of all blocks are stored: one signal per mapped receiver, even without rows. None if this rank has been
    // told of a failure: its caller may have overwritten rows before they were loaded (P12).
    if (op.last_block(kStored)) {
        if (threadIdx.x == 0) op.looks_clear();
        if (!op.sync_block()) return;
        for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
            if (targets[r].x != nullptr) op.signal(r, wire::kData);
        }
    }

    DispatchChunks<Shape> chunks{args, op, targets, shape, copies};
    const auto sends = [&](u32 to) { return op.present(to) && targets[to].x == nullptr; };
    // Ranks whose rows come directly into the output, and ranks whose rows come in chunks.
    const auto stores = [&](u32 from) { return args.offer.visible != 0 && op.mapped(from); };
    const auto receives = [&](u32 from) { return op.present(from) && !stores(from); };
    StreamWork work(op, args.layout, chunks, sends, receives, at.range.in(shared));
    take_turns(op, work, Turns::in(at.turns.in(shared)));
    op.ended(Stage::kServe);
    if (!op.last_to_finish()) return;

    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (stores(r)) op.wait_signal(Phase::kData, wire::kData, r, 1);
    }
    if (!op.sync_block()) return;
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (op.mapped(r)) op.consume(wire::kOffer, r, 1);
        if (stores(r)) op.consume(wire::kData, r, 1);
        consume_stream(op, r, sends(r) ? chunks.sent_chunks(r) : 0, receives(r) ? chunks.received_chunks(r) : 0);
    }
    op.finish(false);
}

struct DispatchKernel {
    static constexpr const char* kName = "dispatch";
    using Args = DispatchArgs;
    template <class Shape>
    static constexpr auto kEntry = dispatch<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return DispatchShared(block).bytes; }
};

}  // namespace deep_ep
