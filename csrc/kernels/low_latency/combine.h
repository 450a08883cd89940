// Low-latency combine: every row of an expert's results returns to the rank that owns its token, which sums a token's
// results with the weights that only it knows. If the dispatch had the weights, results for a rank that is not mapped
// are summed on their own node, by the forwarder of wire/low_latency.h, and the sum is returned.
//
// The results are summed in the order of the token's choices: ((0 + weight * result) + ...) in fp32, with each product
// rounded and the sum rounded once. Sums from other nodes, each rounded separately, are added in ascending order of
// nodes, with this node's results at the place of their node. Results are pushed, so the caller may overwrite x once
// the sending half is complete. Alternatively, a rank publishes x: mapped ranks read it in place, and the rank's
// receiving half ends when they have done so (P12). Results that travel as LogFMT are always pushed, and cast on the
// way: logfmt_rows.h.
//
// The waits, in this order so that no cycle can form (P11):
//
//   free of every rank   given at the end of an earlier operation
//   results to sum       after the senders' halves, which wait for nothing but `free`
//   results              after the senders' halves or their forwarders' sums; a hook launches neither
//   read                 after the owners' sums, which wait for nothing but results
#pragma once

#include "kernels/low_latency/combine_forward.h"
#include "kernels/low_latency/logfmt_rows.h"

namespace deep_ep::low_latency {

// Rows of a local expert that belong to one source.
struct Range {
    u32 begin;
    u32 count;
};

// One thread or all: reads a range from the handle. Fails the operation and returns false if it is invalid.
DEEP_EP_DEVICE bool range_of(const CombineArgs& args, Operation& op, u32 ranks, u32 expert, u32 source, Range& range) {
    const auto* const entry = args.origins.ranges + static_cast<u64>(expert) * ranks + source;
    const u64 packed = static_cast<u64>(*const_cast<const volatile i64*>(entry));
    range = {static_cast<u32>(packed >> 32), static_cast<u32>(packed)};
    const u64 capacity = static_cast<u64>(ranks) * args.layout.max_tokens;
    if (u64{range.begin} + range.count <= capacity && range.count <= args.layout.max_tokens) return true;
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(source), capacity, packed);
    return false;
}

DEEP_EP_DEVICE u32 load_position(const CombineArgs& args, u64 index) {
    return *const_cast<const volatile u32*>(args.origins.positions + index);
}
// One thread or all: finds where a row's result goes. Fails the operation and returns false if the position is invalid.
DEEP_EP_DEVICE bool place_of(const CombineArgs& args, Operation& op, u32 ranks, u32 position, u32& owner, u32& slot) {
    owner = wire::position_rank(position);
    slot = wire::position_slot(position);
    if (owner < ranks && slot < args.layout.max_results()) return true;
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(op.rank()), args.layout.max_results(), position);
    return false;
}

// The block: gathers the results for an owner that is not mapped, and puts them with their header. If a forwarder sums
// them, they stay here: the forwarder loads them once it has acquired `kData`, of which each block adds its share, a
// release, after its barrier (send_combine()). `kept` is the array for this put.
template <class Shape>
DEEP_EP_DEVICE bool put_results(const CombineArgs& args, Operation& op, const Shape& shape, u32 owner, u32* kept) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 ranks = shape.ranks(), row_bytes = shape.row_bytes();
    const u64 region = op.region_offset(), staged = region + layout.results_send(owner);
    const u32 first = *const_cast<const volatile u32*>(args.origins.first_result + owner);
    u32 results = 0;
    bool keeps = false;
    for (u32 e = 0; e < layout.experts_per_rank; ++e) {
        Range range;
        if (!range_of(args, op, ranks, e, owner, range)) break;
        for (u32 i = 0; i < range.count; ++i, ++results) {
            if (results % device::warps() != device::warp()) continue;
            const u64 index = static_cast<u64>(e) * ranks * layout.max_tokens + range.begin + i;
            u32 source, slot;
            if (!place_of(args, op, ranks, load_position(args, index), source, slot)) break;
            if (source != owner || slot >= layout.max_results_of_rank()) {
                op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(owner), layout.max_results_of_rank(), slot);
                break;
            }
            u8* const place = op.peers().local + staged + static_cast<u64>(slot) * layout.result_bytes;
            const u8* const x = args.x + index * row_bytes;
            if (layout.rest_bytes == 0) {
                device::warp_copy(place, x, row_bytes);
            } else {
                u8* const rest = op.peers().local + region + layout.rests_send(owner) + u64{slot} * layout.rest_bytes;
                keeps = cast_result(place, rest, x, row_bytes) || keeps;
            }
        }
    }
    note_kept(kept, keeps);
    if (u64{first} + results > layout.max_results() || results > layout.max_results_of_rank()) {
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(owner), layout.max_results(), u64{first} + results);
    }
    if (layout.weighted != 0) return true;
    if (threadIdx.x == 0) write_header(op, op.peers().local + region + layout.header_send(owner), wire::kUnpublished);
    if (!op.sync_block()) return false;  // all warps' rows come before the first one's put
    if (device::warp() == 0) {
        const u64 slot = layout.max_results() + first;
        const fabric::Piece pieces[] = {
            {region + layout.header_send(owner), region + layout.header(op.rank()), sizeof(wire::ResultHeader)},
            {staged, region + layout.slot(slot), u64{results} * layout.result_bytes},
            {region + layout.rests_send(owner), region + layout.rest(slot), u64{results} * layout.rest_bytes}};
        op.put_signal(owner, wire::kChunk, pieces, results == 0 ? 1 : any_kept(kept) ? 3 : 2);
    }
    return true;
}

// A warp's view of the rows of as many experts as it has lanes, in the order of experts, each lane having loaded the
// last range of its own.
class ExpertRows {
  public:
    // Fails the operation if a range is invalid.
    DEEP_EP_DEVICE ExpertRows(const CombineArgs& args, Operation& op, u32 ranks, u32 first)
        : first_(first), capacity_(ranks * args.layout.max_tokens) {
        const u32 expert = first + device::lane();
        Range last{};
        const bool valid = expert >= args.layout.experts_per_rank || range_of(args, op, ranks, expert, ranks - 1, last);
        valid_ = __all_sync(device::kFullMask, valid) != 0;
        rows_ = valid ? last.begin + last.count : 0;
        end_ = rows_;
        for (u32 step = 1; step < device::kWarpSize; step *= 2) {
            const u32 before = __shfl_up_sync(device::kFullMask, end_, step);
            if (device::lane() >= step) end_ += before;
        }
    }
    DEEP_EP_DEVICE bool valid() const { return valid_; }
    DEEP_EP_DEVICE u32 count() const {
        return __shfl_sync(device::kFullMask, end_, static_cast<int>(device::kWarpSize - 1));
    }
    // All lanes call it, each for a row below count(): returns the row's index among all rows of this rank's experts.
    DEEP_EP_DEVICE u32 index(u32 row) const {
        u32 lane = 0;
        for (u32 step = device::kWarpSize / 2; step != 0; step /= 2) {
            const u32 end = __shfl_sync(device::kFullMask, end_, static_cast<int>(lane + step - 1));
            lane += end <= row ? step : 0;
        }
        const u32 begin = __shfl_sync(device::kFullMask, end_ - rows_, static_cast<int>(lane));
        return (first_ + lane) * capacity_ + row - begin;
    }

  private:
    const u32 first_, capacity_;
    u32 rows_, end_;  // of this lane's expert; the end of its rows among those of all lanes
    bool valid_;
};

// All warps of all blocks: store results for mapped owners directly into their slots. The stores are complete when a
// warp leaves, and each block's share of the signal, a release at system scope after its barrier, covers them.
template <class Shape>
DEEP_EP_DEVICE void store_results(const CombineArgs& args, Operation& op, const Shape& shape, u8* stage) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 ranks = shape.ranks(), row_bytes = shape.row_bytes();
    const u32 warps = gridDim.x * device::warps(), warp = blockIdx.x * device::warps() + device::warp();
    const u64 region = op.region_offset();
    const bool casts = layout.rest_bytes != 0;
    const auto row_at = [&](u32 index) { return args.x + u64{index} * row_bytes; };
    device::RowCopies copies(stage);
    u32 before = 0;  // rows of the experts so far, so that each warp gets an equal share of all rows
    for (u32 first = 0; first < layout.experts_per_rank; first += device::kWarpSize) {
        const ExpertRows rows(args, op, ranks, first);
        if (!rows.valid()) break;
        const u32 count = rows.count();
        // Finds where a row goes. False: it is not stored here, or the operation fails.
        u32 index = 0, owner = 0, slot = 0;
        const auto find = [&](u32 row) {
            index = rows.index(row);
            // One lane loads it, since all must find the same.
            const u32 position = device::lane() == 0 ? load_position(args, index) : 0;
            return place_of(args, op, ranks, __shfl_sync(device::kFullMask, position, 0), owner, slot) &&
                   op.mapped(owner);
        };
        u32 row = (warp + warps - before % warps) % warps;
        bool goes = row < count && find(row);
        if (goes && !casts) copies.load(row_at(index), row_bytes);
        while (row < count) {
            const u32 of = owner, to = slot;
            const u8* const x = row_at(index);
            const bool stored = goes;
            row += warps;
            goes = row < count && find(row);
            if (goes && !casts) copies.load(row_at(index), row_bytes);  // while the row before it is stored
            if (!stored) continue;
            // Not earlier, when the row before it was still being stored (P17).
            const bool may_store = broadcast(op.may_send(of)) != 0;
            u8* const place = fabric::address(op.peers(), of, region + layout.slot(to));
            if (!casts) {
                copies.to_many(&place, may_store ? 1 : 0, x, row_bytes, args.streaming != 0);
            } else if (may_store) {
                cast_result(place, fabric::address(op.peers(), of, region + layout.rest(to)), x, row_bytes);
            }
        }
        before += count;
    }
    copies.finish();
}

// All threads of all blocks: tell mapped owners which rows hold their results. Plain stores, released as results are.
// The same release covers x, which was written before this kernel.
template <class Shape>
DEEP_EP_DEVICE void publish_results(const CombineArgs& args, Operation& op, const Shape& shape) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 ranks = shape.ranks(), warps = gridDim.x * device::warps();
    const u32 warp = blockIdx.x * device::warps() + device::warp();
    for (u32 first = 0; first < layout.experts_per_rank; first += device::kWarpSize) {
        const ExpertRows rows(args, op, ranks, first);
        if (!rows.valid()) return;
        const u32 count = rows.count();
        for (u32 base = warp * device::kWarpSize; base < count; base += warps * device::kWarpSize) {
            const u32 row = base + device::lane(), index = rows.index(min(row, count - 1));
            u32 owner, slot;
            if (row >= count || !place_of(args, op, ranks, load_position(args, index), owner, slot) ||
                !op.mapped(owner))
                continue;
            u8* const place = fabric::address(op.peers(), owner, op.region_offset() + layout.published_row(slot));
            *reinterpret_cast<u32*>(place) = index;
        }
    }
}

// The block. Each rank serves owners starting at its next rank, so that not all ranks start at the same owner. Warps
// may reach the next put while the first warp still reads what they noted for this one, but cannot get further ahead:
// two `kept` arrays suffice.
template <class Shape>
DEEP_EP_DEVICE bool send_combine(const CombineArgs& args, Operation& op, const Shape& shape, u32* kept, u8* stage) {
    const u32 ranks = shape.ranks();
    u32 puts = 0;
    for (u32 i = blockIdx.x; i < ranks; i += gridDim.x) {
        const u32 owner = (op.rank() + 1 + i) % ranks;
        if (!op.present(owner)) continue;
        if (op.maps(owner)) {
            u8* const place = fabric::address(op.peers(), owner, op.region_offset() + args.layout.header(op.rank()));
            if (threadIdx.x == 0 && op.may_send(owner)) write_header(op, place, args.published);
        } else if (!put_results(args, op, shape, owner, kept + puts++ % 2 * device::warps())) {
            return false;
        }
    }
    if (args.published == wire::kUnpublished) {
        store_results(args, op, shape, stage);
    } else {
        publish_results(args, op, shape);
    }
    op.ended(Stage::kStore);
    if (!op.sync_block()) return false;  // the block's stores come before its share of each signal
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (op.mapped(r)) op.signal_share(r, wire::kData);
    }
    // This thread is not needed for the next half's first wait.
    if (threadIdx.x == blockDim.x - 1) op.end_send();
    op.ended(Stage::kSignal);
    return true;
}

DEEP_EP_DEVICE u32 result_word(const Operation& op, u32 from) { return op.maps(from) ? wire::kData : wire::kChunk; }

// One thread: returns a rank's published results; null if they are in slots. Fails the operation if their place is
// invalid.
DEEP_EP_DEVICE const u8* published_by(const CombineArgs& args, Operation& op, u32 from, u64 offset) {
    if (offset == wire::kUnpublished || !op.maps(from)) return nullptr;
    const wire::LowLatencyLayout& layout = args.layout;
    if (layout.rest_bytes != 0) {  // cast results are never published
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from), wire::kUnpublished, offset);
        return nullptr;
    }
    const u64 rows = u64{layout.experts_per_rank} * layout.ranks * layout.max_tokens;
    // The host raises it while kernels run. An older value only refuses an offset, and nothing else must be visible
    // with it: relaxed.
    const u64 end = device::load_relaxed<Scope::kSystem>(&op.peers().mapped_bytes[from]);
    const u64 begin = op.peers().heap.arena_offset();
    if (begin <= offset && offset <= end && rows * layout.result_bytes <= end - offset)
        return fabric::address(op.peers(), from, offset);
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from), end, offset);
    return nullptr;
}

// Returns whether a rank's results come directly from that rank.
DEEP_EP_DEVICE bool sends_itself(const CombineArgs& args, const Operation& op, u32 from) {
    return op.maps(from) || args.layout.weighted == 0 || args.layout.same_local_index(from, op.rank());
}

// The block: waits until every rank's results have arrived or the rank is masked.
DEEP_EP_DEVICE bool await_results(const CombineArgs& args, Operation& op, u32 ranks, Results* results) {
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        results[r] = {};
        if (!op.present(r) || !sends_itself(args, op, r)) continue;
        const u64 begin = args.waited_ns != nullptr ? device::now_ns() : 0;
        const bool is_forwarded = args.layout.sums_remotely() && args.layout.forwards_rows() && !op.maps(r);
        const bool arrived =
            op.wait_signal(is_forwarded ? Phase::kForwarded : Phase::kResults, result_word(op, r), r, 1);
        if (!(arrived || op.masked(r)) || !op.takes_part(r)) continue;
        if (args.waited_ns != nullptr && blockIdx.x == 0) {
            args.waited_ns[r] += static_cast<i64>(device::now_ns() - begin);
        }
        const auto header = copy_once<wire::ResultHeader>(op.local_region() + args.layout.header(r));
        if (!op.check_message(Phase::kResults, r, header.operation, header.arguments)) continue;
        results[r] = {published_by(args, op, r, header.published), 1};
    }
    return op.sync_block();
}

// One lane: returns where the result of a choice is; null if there is none. Fails the operation if its place is
// invalid.
DEEP_EP_DEVICE const u8* result_of(const CombineArgs& args, Operation& op, u32 ranks, const Results* results,
                                   u64 choice) {
    const wire::LowLatencyLayout& layout = args.layout;
    if (layout.weighted == 0 && args.topk_idx.get(choice) < 0) return nullptr;
    const u32 position = *const_cast<const volatile u32*>(args.origins.own_slots + choice);
    if (position == wire::kNoPosition) return nullptr;
    const u32 from = wire::position_rank(position), slot = wire::position_slot(position);
    if (from >= ranks || slot >= layout.slots()) {
        op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(op.rank()), layout.slots(), position);
        return nullptr;
    }
    if (results[from].take_part == 0) return nullptr;
    const u8* const published = results[from].published;
    if (published == nullptr || slot >= layout.max_results()) return op.local_region() + layout.slot(slot);
    const auto* const rows = reinterpret_cast<const volatile u32*>(op.local_region() + layout.published_row(slot));
    const u32 row = *rows;
    if (row < layout.experts_per_rank * ranks * layout.max_tokens) {
        return published + u64{row} * layout.result_bytes;
    }
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(from),
            layout.experts_per_rank * ranks * layout.max_tokens, row);
    return nullptr;
}

// One lane: returns where the sum of a token's results from a node is; null if there is none. Fails the operation if
// its place is invalid.
DEEP_EP_DEVICE const u8* sum_of(const CombineArgs& args, Operation& op, const Results* results, u32 token, u32 node) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 slot =
        *const_cast<const volatile u32*>(args.origins.sum_slots + static_cast<u64>(node) * args.tokens + token);
    const u32 forwarder = layout.forwarder(node, op.rank());
    if (slot == wire::kNoPosition || op.maps(forwarder) || results[forwarder].take_part == 0) return nullptr;
    if (slot < layout.max_tokens) return op.local_region() + layout.sums(node) + u64{slot} * layout.result_bytes;
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(forwarder), layout.max_tokens, slot);
    return nullptr;
}

// A warp: appends the sums of a token's results from nodes [from, to) to its list, from `offset` on.
DEEP_EP_DEVICE void list_sums(const CombineArgs& args, Operation& op, const Results* results, u32 token, u32 from,
                              u32 to, RowList& list, u64 offset) {
    for (u32 base = from; base < to; base += device::kWarpSize) {
        const u32 node = base + device::lane();
        const u8* const row = node < to ? sum_of(args, op, results, token, node) : nullptr;
        list.append(row != nullptr ? row + offset : nullptr, 1);
    }
}

// A warp: sums a token's results, or one of `parts` parts of them.
template <class Shape>
DEEP_EP_DEVICE void sum_results(const CombineArgs& args, Operation& op, const Shape& shape, device::RowSums& row_sums,
                                const u8** rows, float* weights, const Results* results, u32 token, u32 part,
                                u32 parts) {
    const u32 topk = shape.topk(), row_bytes = shape.row_bytes(), own_node = args.layout.node_of(op.rank());
    const bool sums = kForwards && args.layout.sums_remotely();
    const PartOfRow mine(row_bytes, part, parts);
    RowList list{rows, weights, topk, 0};
    if (sums) list_sums(args, op, results, token, 0, own_node, list, mine.begin);
    for (u32 base = 0; base < topk; base += device::kWarpSize) {
        const u32 k = base + device::lane();
        const u64 choice = static_cast<u64>(token) * topk + k;
        const u8* const row = k < topk ? result_of(args, op, shape.ranks(), results, choice) : nullptr;
        list.append(row != nullptr ? row + mine.begin : nullptr, row != nullptr ? args.topk_weights[choice] : 0);
    }
    if (sums) list_sums(args, op, results, token, own_node + 1, args.layout.nodes(), list, mine.begin);
    __syncwarp();  // the list is complete
    u8* const sum = args.combined_x + static_cast<u64>(token) * row_bytes;
    if (args.layout.rest_bytes == 0) {
        row_sums.weighted_sum_bf16(sum + mine.begin, rows, weights, list.count, mine.bytes() / sizeof(u16));
    } else {
        sum_cast_results(sum, rows, weights, list.count, row_bytes, cast_results(args.layout, op.local_region()));
    }
    __syncwarp();  // the list has been read
}

// The block.
template <class Shape>
DEEP_EP_DEVICE void receive_combine(const CombineArgs& args, Operation& op, const Shape& shape, const u8** rows,
                                    float* weights, Results* results, u8* stage, bool forwarded_last) {
    const u32 ranks = shape.ranks(), warps = gridDim.x * device::warps();
    if (!await_results(args, op, ranks, results)) return;
    op.ended(Stage::kResults);
    device::RowSums row_sums(stage);
    // Groups of LogFMT are not divided.
    const u32 parts = args.layout.rest_bytes == 0 ? parts_of_rows(warps, args.tokens) : 1;
    for (u32 task = spread_warp(); task < args.tokens * parts; task += warps) {
        sum_results(args, op, shape, row_sums, rows, weights, results, task / parts, task % parts, parts);
    }
    op.ended(Stage::kSum);
    // Only the block that was the last to post, while others still sum. A kernel launched for this part alone has no
    // such block.
    const bool sent_last = (args.phases & kSend) != 0 ? op.sent_last() : blockIdx.x == 0;
    if ((args.phases & kForward) != 0 ? forwarded_last : sent_last) op.quiet();
    if (!op.last_warp_to_finish()) return;

    // All blocks have read the rows that were published for this owner.
    const bool publishes = args.published != wire::kUnpublished;
    bool read = false;
    for (u32 r = device::lane(); r < ranks; r += device::kWarpSize) {
        if (results[r].published != nullptr) op.signal(r, wire::kRead);
        read = read || results[r].published != nullptr;
    }
    for (u32 r = device::lane(); r < ranks; r += device::kWarpSize) {
        if (results[r].take_part == 0) continue;
        op.consume(result_word(op, r), r, 1);
        if (publishes && op.maps(r) && op.wait_signal(Phase::kRead, wire::kRead, r, 1)) op.consume(wire::kRead, r, 1);
    }
    op.finish_warp(__any_sync(device::kFullMask, read) != 0);
}

// Works with any grid size.
template <class Shape>
DEEP_EP_KERNEL void combine(DEEP_EP_ARGUMENT const CombineArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    const auto shape = Shape::of(args.shape);
    const CombineShared at({shape.ranks(), 0, shape.topk(), device::warps(), device::RowCopies::kSharedBytes});
    u8* const stage =
        at.stage.in(shared) + device::warp() * device::copies_and_sums_bytes(device::RowCopies::kSharedBytes);
    if ((args.phases & kSend) != 0) {
        if (!op.enter_first(wire::Kind::kLowLatencyCombine, args.arguments, shape.ranks())) return;
        if (lacks_forwarders(op, args.layout)) return;
        if (!send_combine(args, op, shape, at.kept.in(shared), stage)) return;
    } else if (!op.enter()) {
        return;
    }
    const u32 own = device::warp() * shape.topk();
    const u8** const rows = at.rows.in(shared) + own;
    float* const weights = at.weights.in(shared) + own;
    bool forwarded_last = false;
    if (kForwards && (args.phases & kForward) != 0) {
        u32* const before = at.before.in(shared) + device::warp() * args.layout.per_node;
        if (!forward_sums(args, op, shape, before, rows, weights, forwarded_last)) return;
    }
    if ((args.phases & kReceive) == 0) return;
    receive_combine(args, op, shape, rows, weights, at.results.in(shared), stage, forwarded_last);
}

struct CombineKernel {
    static constexpr const char* kName = "low_latency_combine";
    using Args = CombineArgs;
    template <class Shape>
    static constexpr auto kEntry = combine<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return CombineShared(block).bytes; }
};

}  // namespace deep_ep::low_latency
