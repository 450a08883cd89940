// combine: the rows of every rank return to the ranks that own the tokens, which sum them.
//
// A producer whose rows peers can see publishes them, and the owners load them (pull, P12). Otherwise it sends them in
// chunks: chunk k of a row stream holds the rows of the owner's tokens [kW, (k+1)W), where W is the number of rows per
// chunk, so that an owner can sum a round once chunk k of every such producer has arrived. A block fills a chunk whose
// slot is free, or sums a round whose chunks have all arrived, and blocks on neither (P11).
//
// The order of summation is fixed. In fp32, rounded once: ((0 + row of the lowest rank) + row of the next rank ...) +
// bias 0 + bias 1. If the caller gives the tokens' choices: ((0 + bias 0) + bias 1) + the ranks' rows, in the order of
// the last choice that each rank holds.
#pragma once

#include "device/copy_stage.h"
#include "kernels/common/divider.h"
#include "kernels/common/expert_ids.h"
#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"
#include "kernels/common/shape.h"
#include "kernels/normal/offers.h"
#include "kernels/normal/staging.h"

namespace deep_ep {

// Copied at launch. Pointers are device pointers.
struct CombineArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::RegionLayout layout;
    u64 arguments;  // hash of what all ranks must agree on
    u32 tokens;
    u32 rows;                   // received in dispatch, or more than that
    const u8* x;                // [rows, row_bytes]
    const float* topk_weights;  // [rows, topk], null: no weights are combined
    const i32* src_idx;         // [rows, source_words] token index at the owner, then what this kernel does not read
    u32 source_words;
    Plan plan;
    wire::Offer offer;        // where x and topk_weights are, if peers can see them
    u8* combined_x;           // [tokens, row_bytes]
    float* combined_weights;  // [tokens, topk]
    const u8* bias[2];        // [tokens, row_bytes] or null
    ExpertIds topk_idx;       // [tokens, choices] this rank's choices, which determine the order of summation
    u32 choices;              // 0: rank order
    u32 experts;
    Divider experts_per_rank;
};

// Where a source's rows for this owner are: the address of the one with index 0. For a producer that sends chunks it is
// set in every round and may point outside the slot.
struct CombineSource {
    const u8* x;
    const float* weights;
    u32 pulled;      // rows are read in place
    u32 staged;      // rows come in chunks; if neither is set, the rank is left out
    RowRange there;  // which of this owner's rows are available: all that the rank has, or those of a round
    u32 rows;        // this owner's rows that the rank has
    RowRange here;   // the rank's rows, as an owner, among those received here
    u32 rounds;      // number of rounds in which the rank, as an owner, takes rows that come in chunks
};

struct CombineShared {
    SharedArray<u8> stages;
    SharedArray<CombineSource> sources;
    SharedArray<const u8*> rows;  // [warps, summands] for the token that a warp sums: its summands, then their weights
    SharedArray<u32> turns;
    SharedArray<RowRange> range;  // of the chunk whose turn it is
    u32 bytes;

    constexpr explicit CombineShared(const BlockSizes& block, SharedCut cut = {})
        : stages(cut.take<u8>(block.warps * device::copies_and_sums_bytes(block.copies_bytes))),
          sources(cut.take<CombineSource>(block.ranks)),
          rows(cut.take<const u8*>(block.warps * summands(block.ranks))),
          turns(cut.take<u32>(Turns::words(stream_entries(block.ranks, false) + 1))),
          range(cut.take<RowRange>(1)),
          bytes(cut.end()) {}

    static constexpr u32 summands(u32 ranks) { return 2 + ranks; }  // biases and rows
};

// The same on all ranks, since a rank without rows has null addresses for them.
DEEP_EP_DEVICE bool carries_weights(const CombineArgs& args) { return args.layout.format.has_weights(); }

// Fills the chunks that a producer sends.
template <class Shape>
struct CombineChunks {
    static constexpr bool kReceives = false;  // they come in rounds
    const CombineArgs& args;
    Operation& op;
    const CombineSource* sources;
    Shape shape;
    device::RowCopies& copies;

    DEEP_EP_DEVICE u32 rounds(u32 owner) const { return sources[owner].rounds; }
    DEEP_EP_DEVICE u32 sent_chunks(u32 owner) const { return rounds(owner); }

    // Rows received from `owner` begin here among all received rows.
    DEEP_EP_DEVICE u32 start(u32 owner) const { return sources[owner].here.first; }
    // A warp: index, among the owner's rows from `from` on, of the first one whose token is not before `token`; rows
    // are sorted by token. `most` rows at most are looked at.
    DEEP_EP_DEVICE u32 first_row(u32 owner, u32 token, u32 from, u32 most) const {
        const i32* const tokens = args.src_idx + u64{start(owner)} * args.source_words;
        return first_not_below(from, from + min(most, sources[owner].here.rows - from),
                               [&](u32 row) { return static_cast<u32>(tokens[u64{row} * args.source_words]) < token; });
    }
    // A warp: stores which of the owner's rows belong in a chunk. A token has at most one row. Indices that say
    // otherwise do not belong to this handle, and the operation fails.
    DEEP_EP_DEVICE bool find_rows(u32 owner, u32 chunk, RowRange& range) const {
        const u32 window = args.layout.chunk_rows;
        const u32 first = first_row(owner, chunk * window, 0, ~0u);
        const u32 rows = first_row(owner, (chunk + 1) * window, first, window + 1) - first;
        if (device::lane() == 0) range = {first, rows};
        if (rows <= window) return true;
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(owner), window, rows);
        return false;
    }
    // Each warp of a block: writes its part of the rows.
    DEEP_EP_DEVICE void fill(u8* message, u32 owner, const RowRange& range) {
        const u32 rows = range.rows, row_bytes = shape.row_bytes();
        const u64 row = start(owner) + range.first;
        copy_rows(
            copies, rows, row_bytes, false, [&](u32 i) { return args.x + (row + i) * row_bytes; },
            [&](u32 i) { return message + args.layout.format.x_offset() + u64{i} * row_bytes; });
        auto* weights = reinterpret_cast<float*>(message + args.layout.format.topk_weights_offset(rows));
        for (u32 i = threadIdx.x; carries_weights(args) && i < rows * shape.topk(); i += blockDim.x) {
            weights[i] = args.topk_weights[row * shape.topk() + i];
        }
    }
};

// The block: finds which producers publish, and where.
template <class Shape>
DEEP_EP_DEVICE bool find_sources(const CombineArgs& args, Operation& op, const Shape& shape, CombineSource* sources) {
    const u32 ranks = shape.ranks();
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        CombineSource source{};
        RowRange mine;
        const bool planned = planned_rows(op, args.plan, op.rank(), r, args.tokens, mine) &&
                             planned_rows(op, args.plan, r, op.rank(), args.rows, source.here);
        source.rows = mine.rows;
        if (!op.present(r) && (mine.rows | source.here.rows) != 0) {
            // The plan is of a generation in which that rank took part: that of a captured call.
            op.fail(wire::kOutdated, Phase::kMask, static_cast<i32>(r), 0, 0);
        }
        wire::Offer offer;
        if (planned && await_offer(args.layout, op, r, mine, 0, 1, offer)) {
            const u64 start = mine.first;
            const u8* heap = fabric::address(op.peers(), r, 0);
            source.x = heap + offer.x + start * shape.row_bytes();
            source.weights = reinterpret_cast<const float*>(heap + offer.topk_weights) + start * shape.topk();
            source.pulled = 1;
            source.there = {0, mine.rows};
        }
        source.staged = source.pulled == 0 && op.present(r);
        const u32 tokens = device::read_once(static_cast<u32>(args.plan.source_tokens[r]));
        if (tokens > wire::kMaxTokens || (r == op.rank() && tokens != args.tokens)) {
            op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r),
                    r == op.rank() ? args.tokens : wire::kMaxTokens, tokens);
        }
        source.rounds = tokens == 0 ? 1 : wire::ceil_div(tokens, args.layout.chunk_rows);
        if (source.here.first + u64{source.here.rows} > args.rows) {
            op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), args.rows,
                    source.here.first + u64{source.here.rows});
        }
        sources[r] = source;
    }
    return op.sync_block();
}

// One thread: finds the row of a token at a rank. Returns false if there is none.
DEEP_EP_DEVICE bool find_row(Operation& op, const CombineSource* sources, const i32* token_row, u32 r, u32& row) {
    const i32 planned = planned_row(token_row, r);
    if (planned < 0) return false;
    row = static_cast<u32>(planned);
    if (row - sources[r].there.first < sources[r].there.rows) return true;
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), sources[r].rows, row);
    return false;
}

// A warp: lists address_of(source, row) for each rank that has a row of this token, in rank order. Returns their
// number.
template <class AddressOf>
DEEP_EP_DEVICE u32 list_rows(Operation& op, u32 ranks, const CombineSource* sources, const i32* token_row,
                             const u8** rows, AddressOf address_of) {
    const u32 lanes_below = (1u << device::lane()) - 1;
    u32 count = 0;
    __syncwarp();  // the previous list has been read
    for (u32 base = 0; base < ranks; base += device::kWarpSize) {
        const u32 r = base + device::lane();
        u32 row = 0;
        const bool there = r < ranks && find_row(op, sources, token_row, r, row);
        const u32 mask = __ballot_sync(device::kFullMask, there);
        if (there) rows[count + __popc(mask & lanes_below)] = address_of(sources[r], static_cast<u64>(row));
        count += __popc(mask);
    }
    __syncwarp();  // the list is complete
    return count;
}

// The rank that holds a token's k-th choice; `ranks` or more if there is none.
DEEP_EP_DEVICE u32 rank_of_choice(const CombineArgs& args, u32 token, u32 k) {
    const i64 expert = args.topk_idx.get(u64{token} * args.choices + k);
    return static_cast<u64>(expert) < args.experts ? args.experts_per_rank.divide(static_cast<u32>(expert)) : ~0u;
}

// A warp: lists the biases, then the rows of the ranks that hold a token's choices, each where the token has its last
// choice there. Returns their number. The caller may write the choices meanwhile: the list is never overrun.
DEEP_EP_DEVICE u32 list_chosen_rows(const CombineArgs& args, Operation& op, u32 ranks, u32 row_bytes,
                                    const CombineSource* sources, u32 token, const u8** rows) {
    const u32 lanes_below = (1u << device::lane()) - 1;
    const i32* const token_row = args.plan.token_row + u64{token} * ranks;
    u32 count = 0;
    __syncwarp();  // the previous list has been read
    for (const u8* const bias : args.bias) {
        if (bias == nullptr) continue;
        if (device::lane() == 0) rows[count] = bias + u64{token} * row_bytes;
        ++count;
    }
    for (u32 base = 0; base < args.choices; base += device::kWarpSize) {
        const u32 k = base + device::lane(), r = k < args.choices ? rank_of_choice(args, token, k) : ~0u;
        bool last = r < ranks;
        for (u32 j = k + 1; last && j < args.choices; ++j) last = rank_of_choice(args, token, j) != r;
        u32 row = 0;
        const bool there = last && find_row(op, sources, token_row, r, row);
        const u32 mask = __ballot_sync(device::kFullMask, there), at = count + __popc(mask & lanes_below);
        if (there && at < CombineShared::summands(ranks)) rows[at] = sources[r].x + u64{row} * row_bytes;
        count += __popc(mask);
    }
    __syncwarp();  // the list is complete
    return count < CombineShared::summands(ranks) ? count : CombineShared::summands(ranks);
}

// A warp: the weights of a token's choices, each from the row of the rank that holds it; 0 where there is none.
template <class Shape>
DEEP_EP_DEVICE void take_chosen_weights(const CombineArgs& args, Operation& op, const Shape& shape,
                                        const CombineSource* sources, u32 token) {
    const i32* const token_row = args.plan.token_row + u64{token} * shape.ranks();
    for (u32 k = device::lane(); k < shape.topk(); k += device::kWarpSize) {
        const u32 r = rank_of_choice(args, token, k);
        u32 row = 0;
        const bool there = r < shape.ranks() && find_row(op, sources, token_row, r, row);
        args.combined_weights[u64{token} * shape.topk() + k] =
            there ? sources[r].weights[u64{row} * shape.topk() + k] : 0.0f;
    }
}

// A warp: sums one token's rows.
template <class Shape>
DEEP_EP_DEVICE void sum_token(const CombineArgs& args, Operation& op, const Shape& shape, const CombineSource* sources,
                              device::RowSums& sums, const u8** rows, u32 token) {
    const u32 ranks = shape.ranks(), row_bytes = shape.row_bytes(), topk = shape.topk();
    const u32 elements = row_bytes / static_cast<u32>(sizeof(u16));
    const u64 offset = static_cast<u64>(token) * row_bytes;
    if (args.choices != 0) {
        const u32 count = list_chosen_rows(args, op, ranks, row_bytes, sources, token, rows);
        sums.sum_bf16(args.combined_x + offset, rows, count, nullptr, nullptr, elements);
        if (carries_weights(args)) take_chosen_weights(args, op, shape, sources, token);
        return;
    }
    const i32* token_row = args.plan.token_row + static_cast<u64>(token) * ranks;
    u32 count = list_rows(op, ranks, sources, token_row, rows,
                          [&](const CombineSource& source, u64 row) { return source.x + row * row_bytes; });
    // Loads from peers: the release of the offer or of the chunk, at system scope, was acquired by a thread of this
    // block (find_sources(), await_round()), and the block has met since.
    sums.sum_bf16(args.combined_x + offset, rows, count, args.bias[0] != nullptr ? args.bias[0] + offset : nullptr,
                  args.bias[1] != nullptr ? args.bias[1] + offset : nullptr, elements);
    if (!carries_weights(args)) return;
    count = list_rows(op, ranks, sources, token_row, rows, [&](const CombineSource& source, u64 row) {
        return reinterpret_cast<const u8*>(source.weights + row * topk);
    });
    for (u32 k = device::lane(); k < topk; k += device::kWarpSize) {
        float sum = 0.0f;
        for (u32 i = 0; i < count; ++i) sum += reinterpret_cast<const float*>(rows[i])[k];
        args.combined_weights[static_cast<u64>(token) * topk + k] = sum;
    }
}

// The work of a block: it sends chunks, and sums its share of this rank's tokens, round by round.
template <class Shape, class Sends>
class CombineWork {
  public:
    DEEP_EP_DEVICE CombineWork(const CombineArgs& args, Operation& op, const Shape& shape, CombineChunks<Shape>& chunks,
                               Sends sends, RowRange* range, CombineSource* sources, device::RowSums& sums,
                               const u8** rows)
        : args_(args),
          op_(op),
          shape_(shape),
          streams_(op, args.layout, chunks, sends, {}, range),
          sources_(sources),
          sums_(sums),
          rows_(rows) {
        bool in_rounds = false;  // something comes or goes in chunks
        for (u32 r = 0; r < shape.ranks(); ++r) {
            staged_ = staged_ || sources[r].staged != 0;
            in_rounds = in_rounds || sends(r);
        }
        // Without chunks there are no rounds to wait for: each block takes one share.
        const u32 share = wire::ceil_div(args.tokens, gridDim.x);
        window_ = staged_ || in_rounds ? args.layout.chunk_rows : max(share, 1u);
        rounds_ = staged_ ? chunks.rounds(op.rank()) : wire::ceil_div(args.tokens, window_);
    }

    // Those of the row streams, then one for the rounds of each block.
    DEEP_EP_DEVICE u32 entries() const { return streams_.entries() + gridDim.x; }
    DEEP_EP_DEVICE u32 steps(u32 entry) const {
        return sums(entry) ? chunks_in_slot(rounds_, first_round(entry), gridDim.x) : streams_.steps(entry);
    }
    DEEP_EP_DEVICE Pending blocked(u32 entry, u32 n) const {
        if (!sums(entry)) return streams_.blocked(entry, n);
        Pending first = Pending::none();
        for (u32 r = 0; staged_ && r < shape_.ranks(); ++r) {
            if (sources_[r].staged == 0) continue;
            const Pending chunk = awaited(r, round_of(entry, n));
            if (!chunk.looks_over() && first.word == nullptr) first = chunk;
        }
        return first;
    }
    DEEP_EP_DEVICE bool open(u32 entry, u32 n) {
        if (!sums(entry)) return streams_.open(entry, n);
        bool fits = true;
        for (u32 r = device::lane(); staged_ && r < shape_.ranks(); r += device::kWarpSize) {
            if (sources_[r].staged != 0) fits = take_chunk(r, round_of(entry, n)) && fits;
        }
        return __all_sync(device::kFullMask, fits) != 0;
    }
    DEEP_EP_DEVICE void step(u32 entry, u32 n) {
        if (!sums(entry)) return streams_.step(entry, n);
        const u32 first = round_of(entry, n) * window_, end = min(first + window_, args_.tokens);
        for (u32 token = first + device::warp(); token < end; token += device::warps()) {
            sum_token(args_, op_, shape_, sources_, sums_, rows_, token);
        }
    }
    DEEP_EP_DEVICE void close(u32 entry, u32 n) {
        if (!sums(entry)) return streams_.close(entry, n);
        // All warps have read the round's slots: each slot is now given back to its writer.
        const u32 round = round_of(entry, n);
        for (u32 r = device::lane(); staged_ && r < shape_.ranks() && round + wire::kSlots < rounds_;
             r += device::kWarpSize) {
            if (sources_[r].staged != 0) op_.signal(r, wire::kNext + round % wire::kSlots);
        }
    }

  private:
    DEEP_EP_DEVICE bool sums(u32 entry) const { return entry >= streams_.entries(); }
    DEEP_EP_DEVICE u32 first_round(u32 entry) const { return entry - streams_.entries(); }
    DEEP_EP_DEVICE u32 round_of(u32 entry, u32 n) const { return first_round(entry) + n * gridDim.x; }
    DEEP_EP_DEVICE Pending awaited(u32 r, u32 round) const {
        return Pending::of(op_, Phase::kChunk, r, wire::kChunk + round % wire::kSlots, r, round / wire::kSlots + 1);
    }
    // One thread: notes where the rows of a chunk that has arrived are.
    DEEP_EP_DEVICE bool take_chunk(u32 r, u32 round) {
        awaited(r, round).acquire();
        CombineSource& source = sources_[r];
        const u8* const message = op_.local_region() + args_.layout.chunk(r, round % wire::kSlots);
        const auto header = copy_once<wire::ChunkHeader>(message);
        if (!op_.check_message(Phase::kChunk, r, header.operation, header.arguments)) return false;
        if (header.rows > args_.layout.chunk_rows || u64{header.first} + header.rows > source.rows) {
            op_.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), source.rows,
                     u64{header.first} + header.rows);
            return false;
        }
        const u64 first = header.first;
        source.there = {header.first, header.rows};
        source.x = message + args_.layout.format.x_offset() - first * shape_.row_bytes();
        const auto* const weights =
            reinterpret_cast<const float*>(message + args_.layout.format.topk_weights_offset(header.rows));
        source.weights = weights - first * shape_.topk();
        return true;
    }

    struct None {
        DEEP_EP_DEVICE bool operator()(u32) const { return false; }
    };

    const CombineArgs& args_;
    Operation& op_;
    const Shape shape_;
    StreamWork<CombineChunks<Shape>, Sends, None> streams_;
    CombineSource* const sources_;
    device::RowSums& sums_;
    const u8** const rows_;
    bool staged_ = false;  // rows come in chunks
    u32 window_;           // tokens of a round
    u32 rounds_;
};

// Works with any grid size. Blocks consist of whole warps.
template <class Shape>
DEEP_EP_KERNEL void combine(DEEP_EP_ARGUMENT const CombineArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    const auto shape = Shape::of(args.shape);
    const u32 ranks = shape.ranks(), warps = device::warps();
    if (!op.enter_and_begin(wire::Kind::kCombine, args.arguments, ranks)) return;

    const CombineShared at({ranks, 0, shape.topk(), warps, device::RowCopies::kSharedBytes});
    auto* sources = at.sources.in(shared);

    if (blockIdx.x == 0) send_offers(args.layout, args.offer, op, ranks);
    if (!find_sources(args, op, shape, sources)) return;
    op.ended(Stage::kOffers);

    u8* const stage =
        at.stages.in(shared) + device::warp() * device::copies_and_sums_bytes(device::RowCopies::kSharedBytes);
    device::RowCopies copies(stage);
    device::RowSums sums(stage);
    CombineChunks<Shape> chunks{args, op, sources, shape, copies};
    // Owners that read this rank's rows in place, and owners that get them in chunks.
    const auto publishes = [&](u32 owner) { return args.offer.visible != 0 && op.mapped(owner); };
    const auto sends = [&](u32 owner) { return op.present(owner) && !publishes(owner); };
    CombineWork work(args, op, shape, chunks, sends, at.range.in(shared), sources, sums,
                     at.rows.in(shared) + device::warp() * CombineShared::summands(ranks));
    take_turns(op, work, Turns::in(at.turns.in(shared)));
    op.ended(Stage::kSum);
    if (!op.last_to_finish()) return;

    // All blocks have read the rows that were published for this owner.
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (sources[r].pulled != 0) op.signal(r, wire::kRead);
    }
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (publishes(r)) op.wait_signal(Phase::kRead, wire::kRead, r, 1);
    }
    if (!op.sync_block()) return;
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (op.mapped(r)) op.consume(wire::kOffer, r, 1);
        if (publishes(r)) op.consume(wire::kRead, r, 1);
        consume_stream(op, r, sends(r) ? chunks.rounds(r) : 0, sources[r].staged != 0 ? chunks.rounds(op.rank()) : 0);
    }
    bool pulled = false;
    for (u32 r = 0; r < ranks; ++r) pulled = pulled || sources[r].pulled != 0;
    op.finish(pulled);
}

struct CombineKernel {
    static constexpr const char* kName = "combine";
    using Args = CombineArgs;
    template <class Shape>
    static constexpr auto kEntry = combine<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return CombineShared(block).bytes; }
};

}  // namespace deep_ep
