// notify: the first kernel of a dispatch that is not cached. It takes the operation's number, finds each token's row at
// each destination and exchanges counts, so that every rank knows where every source's rows begin in every receiver. If
// a dispatch is begun now and finished later, `counts` performs the receiving half of that exchange.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"
#include "kernels/common/shape.h"
#include "kernels/normal/check_ids.h"
#include "kernels/normal/counts.h"

namespace deep_ep {

// Copied at launch. Pointers are device pointers.
struct NotifyArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::RegionLayout layout;
    u64 arguments;  // hash of what all ranks must agree on
    u32 tokens;
    u32 max_rows;                  // that any rank may receive, the same on all ranks; 0: no limit
    u32 finish_later;              // this kernel does not wait for the peers' counts: `counts` follows
    const u8* is_token_in_rank;    // [tokens, ranks]
    const i32* tokens_per_expert;  // [experts]; null without top-k
    u32 checks_ids;                // the layout may not be that of the ids
    ExpertIds topk_idx;            // [tokens, topk] the ids that are sent
    Divider experts_per_rank;
    Plan plan;
    u32 per_node;          // ranks of a node, if the tokens for each node are numbered too
    i32* rows_per_expert;  // [experts / ranks] host-visible: rows received for each local expert
    ReceivedCounts received;
    u64 heap_bytes;  // heap size that this rank announces (P10)
    u64* heaps;      // [ranks] host-visible: size that each rank has announced; null if the host does not wait
};

struct NotifyShared {
    SharedArray<u32> counts;  // [2, warps] tokens that each warp of a group has counted
    SharedArray<u32> tokens;  // [ranks] of each source
    SharedArray<u8> checked;  // of check_ids()
    u32 bytes;

    constexpr explicit NotifyShared(const BlockSizes& block, SharedCut cut = {})
        : counts(cut.take<u32>(2 * block.warps)),
          tokens(cut.take<u32>(block.ranks)),
          checked(cut.take<u8>(checked_ids_bytes(block))),
          bytes(cut.end()) {}
};

// Flags that a lane loads before the first one is used: together they cost one latency of memory.
constexpr u32 kScanSteps = 16;
constexpr u32 kScanned = kScanSteps * device::kWarpSize;  // tokens
// Which of them go to a place: in each word a bit per lane.
using Scan = u32[kScanSteps];

DEEP_EP_DEVICE u32 total(const Scan& scan) {
    u32 count = 0;
#pragma unroll
    for (u32 s = 0; s < kScanSteps; ++s) count += static_cast<u32>(__popc(scan[s]));
    return count;
}

// The place for which a group of warps numbers this rank's tokens: a destination, or, for callers alone, a node. It
// uses no atomics, so that the result is the same on every run.
struct Numbering {
    const NotifyArgs& args;
    const Operation& op;
    const u32 ranks;

    DEEP_EP_DEVICE u32 nodes() const { return args.plan.tokens_to_node != nullptr ? ranks / args.per_node : 0; }
    DEEP_EP_DEVICE u32 places() const { return ranks + nodes(); }

    // A warp: scans the tokens from `batch` on, up to `end`, which is greater. No token goes to a rank that is left
    // out. The flags for ranks of a node are next to each other, so those for the later ones are mostly in the cache by
    // then.
    DEEP_EP_DEVICE void find(u32 place, u32 batch, u32 end, Scan& scan) const {
        const bool is_node = place >= ranks;
        const u32 from = is_node ? (place - ranks) * args.per_node : place,
                  to = is_node ? from + args.per_node : place + 1;
        u32 goes[kScanSteps] = {}, flags[kScanSteps];
        for (u32 r = from; r < to; ++r) {
            if (!op.present(r)) continue;
#pragma unroll
            for (u32 s = 0; s < kScanSteps; ++s) {  // without a branch: the last token stands in for those beyond it
                const u32 token = min(batch + s * device::kWarpSize + device::lane(), end - 1);
                flags[s] = args.is_token_in_rank[static_cast<u64>(token) * ranks + r];
            }
#pragma unroll
            for (u32 s = 0; s < kScanSteps; ++s) goes[s] |= flags[s];
        }
#pragma unroll
        for (u32 s = 0; s < kScanSteps; ++s) {
            const bool exists = batch + s * device::kWarpSize + device::lane() < end;
            scan[s] = __ballot_sync(device::kFullMask, exists && goes[s] != 0);
        }
    }
    // A warp: numbers those of the scanned tokens that go there, from `count` on and in token order. Returns the next
    // number.
    DEEP_EP_DEVICE u32 number(u32 place, u32 batch, u32 end, const Scan& scan, u32 count) const {
        const u32 lanes_below = (1u << device::lane()) - 1;
#pragma unroll
        for (u32 s = 0; s < kScanSteps; ++s) {
            const u32 begin = batch + s * device::kWarpSize, token = begin + device::lane();
            if (begin >= end) break;
            const bool goes = (scan[s] >> device::lane() & 1) != 0;
            if (token < end) note(place, token, goes, count + static_cast<u32>(__popc(scan[s] & lanes_below)));
            count += static_cast<u32>(__popc(scan[s]));
        }
        return count;
    }
    DEEP_EP_DEVICE void note_total(u32 place, u32 tokens) const {
        i32* const total = place < ranks ? args.plan.rows_to_rank + place : args.plan.tokens_to_node + (place - ranks);
        *total = static_cast<i32>(tokens);
    }

  private:
    DEEP_EP_DEVICE void note(u32 place, u32 token, bool goes, u32 number) const {
        const i32 index = goes ? static_cast<i32>(number) : -1;
        if (place >= ranks) {
            args.plan.token_node[static_cast<u64>(token) * nodes() + (place - ranks)] = index;
            return;
        }
        args.plan.token_row[static_cast<u64>(token) * ranks + place] = index;
        if (goes) args.plan.row_token[static_cast<u64>(place) * args.tokens + number] = static_cast<i32>(token);
    }
};

// The first `blocks` blocks: number the tokens for all places. If there are more warps than places, a group of warps
// numbers for one: each warp counts its part of the tokens, and continues from the counts of the parts before. A part
// that it has scanned at once is not scanned again. `counts`: [2, warps] in shared memory. False if the operation is
// given up.
DEEP_EP_DEVICE bool number_all(Operation& op, const Numbering& numbering, u32 blocks, u32* counts) {
    const u32 warps = device::warps(), places = numbering.places(), tokens = numbering.args.tokens;
    const u32 groups = min(warps, wire::ceil_div(places, blocks)), members = warps / groups;
    const u32 group = device::warp() / members, member = device::warp() % members;
    static_assert(wire::kMaxTokens <= ~0u / 1024, "the products fit into 32 bits: a block has at most 1024 warps");
    const u32 first = tokens * member / members, end = tokens * (member + 1) / members;
    const bool counts_first = members > 1, keeps_scan = counts_first && end - first <= kScanned;
    for (u32 begin = blockIdx.x * groups, round = 0; begin < places; begin += blocks * groups, ++round) {
        const u32 place = begin + group;
        const bool mine = group < groups && place < places;
        u32 number = 0;
        Scan scan;
        if (counts_first) {
            // A warp may reach the next round while others still read this one's counts, but cannot get further ahead.
            u32* const of_round = counts + round % 2 * warps;
            u32 own = 0;
            for (u32 batch = first; mine && batch < end; batch += kScanned) {
                numbering.find(place, batch, end, scan);
                own += total(scan);
            }
            if (device::lane() == 0) of_round[device::warp()] = own;
            if (!op.sync_block()) return false;
            u32 before = 0;
            for (u32 other = group * members + device::lane(); other < device::warp(); other += device::kWarpSize) {
                before += of_round[other];
            }
            number = warp_total(before);
        }
        if (!mine) continue;
        for (u32 batch = first; batch < end; batch += kScanned) {
            if (!keeps_scan) numbering.find(place, batch, end, scan);
            number = numbering.number(place, batch, end, scan, number);
        }
        if (member == members - 1 && device::lane() == 0) numbering.note_total(place, number);
    }
    return true;
}

// Threads `first`, `first + step`, ...: write the part of a message that is the same for all receivers.
DEEP_EP_DEVICE void store_common(const NotifyArgs& args, const Operation& op, u32 ranks, u8* message, u32 first,
                                 u32 step) {
    if (first == 0) store_counts_header(op, message, args.tokens, args.heap_bytes);
    store_mask(op, message, first, step);
    auto* const rows_to_rank = reinterpret_cast<i32*>(message + wire::kNotifyCounts);
    for (u32 r = first; r < ranks; r += step) rows_to_rank[r] = args.plan.rows_to_rank[r];
}

// A warp: writes the counts of a receiver's experts.
DEEP_EP_DEVICE void store_expert_counts(const NotifyArgs& args, u32 ranks, u32 to, u8* slice) {
    const u32 experts = args.layout.experts / ranks;
    for (u32 e = device::lane(); args.tokens_per_expert != nullptr && e < experts; e += device::kWarpSize) {
        reinterpret_cast<i32*>(slice)[e] = args.tokens_per_expert[to * experts + e];
    }
}

// The block: writes this rank's message where mapped receivers read it, a warp to each.
DEEP_EP_DEVICE void write_counts(const NotifyArgs& args, Operation& op, u32 ranks) {
    const wire::RegionLayout& layout = args.layout;
    const u64 target = op.region_offset() + layout.notify_row(op.rank());
    for (u32 r = device::warp(); r < ranks; r += device::warps()) {
        if (!op.present(r) || !op.maps(r) || !broadcast(op.may_send(r))) continue;
        u8* const message = fabric::address(op.peers(), r, target);
        store_common(args, op, ranks, message, device::lane(), device::kWarpSize);
        store_expert_counts(args, ranks, r, message + layout.notify_common_bytes());
        __syncwarp();  // all lanes' stores come before the first one's release
        if (device::lane() == 0) op.signal(r, wire::kNotify);
    }
}

// The block: builds the message in this rank's region and puts it to receivers that are not mapped.
DEEP_EP_DEVICE void put_counts(const NotifyArgs& args, Operation& op, u32 ranks) {
    const wire::RegionLayout& layout = args.layout;
    const u64 source = op.region_offset() + layout.notify_send();
    const u64 target = op.region_offset() + layout.notify_row(op.rank());
    const u64 common = layout.notify_common_bytes(), slice = layout.expert_counts_bytes();
    u8* const message = op.local_region() + layout.notify_send();
    store_common(args, op, ranks, message, threadIdx.x, blockDim.x);
    if (!op.sync_block()) return;  // the whole block's stores precede each warp's put
    for (u32 r = device::warp(); r < ranks; r += device::warps()) {
        if (!op.present(r) || op.maps(r)) continue;
        store_expert_counts(args, ranks, r, message + common + r * slice);
        // put_signal() orders the lanes' stores before the message.
        const fabric::Piece pieces[] = {{source, target, common},
                                        {source + common + r * slice, target + common, slice}};
        op.put_signal(r, wire::kNotify, pieces, slice != 0 ? 2 : 1);
    }
}

// The block: waits for the messages of all ranks and checks that they belong to this operation. `tokens`: [ranks] in
// shared memory, receives those of each source.
DEEP_EP_DEVICE bool receive_counts(const NotifyArgs& args, Operation& op, u32 ranks, u32* tokens) {
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (!op.present(r)) {
            args.plan.source_tokens[r] = 0;
            tokens[r] = 0;
            if (args.heaps != nullptr) args.heaps[r] = 0;
            continue;
        }
        if (!op.wait_signal(Phase::kNotify, wire::kNotify, r, 1)) continue;
        const u8* const message = op.local_region() + args.layout.notify_row(r);
        wire::NotifyHeader header;
        if (!check_counts(op, r, message, header)) continue;
        args.plan.source_tokens[r] = static_cast<i32>(header.tokens);
        tokens[r] = header.tokens;
        if (args.heaps != nullptr) args.heaps[r] = header.heap_bytes;  // the host reads it after `counts_ready`
        op.consume(wire::kNotify, r, 1);
    }
    return op.sync_block();
}

// The block: finds where every source's rows end in every receiver, and what this rank receives. All ranks see the same
// counts, so if one of them would receive too much, all refuse.
DEEP_EP_DEVICE void make_plan(const NotifyArgs& args, Operation& op, u32 ranks, const u32* tokens) {
    static_assert(u64{wire::kMaxTokens} * wire::kMaxRanks <= 0x7fffffff, "rows of a rank fit into 31 bits");
    const u8* rows = op.local_region();
#pragma unroll 1
    for (u32 to = threadIdx.x; to < ranks; to += blockDim.x) {
        i32 sum = 0;
        const auto rows_of = [&](u32 from) { return rows + args.layout.notify_row(from) + wire::kNotifyCounts; };
        for_counts(op, ranks, to, rows_of, [&](u32 from, u32 count) {
            const i32 begin = sum;
            sum += bounded_count(op, from, count, tokens[from]);
            args.plan.rank_prefix[from * ranks + to] = sum;
            if (to != op.rank() || args.plan.rank_end == nullptr) return;
            args.plan.rank_begin[from] = begin;
            args.plan.rank_end[from] = sum;
        });
        if (to == op.rank()) args.call.outcome->total_rows = sum;
        if (args.max_rows != 0 && static_cast<u32>(sum) > args.max_rows) {
            op.fail(wire::kOverflow, Phase::kNotify, static_cast<i32>(to), args.max_rows, static_cast<u64>(sum));
        }
    }
    // From the last thread on, beside the first ones' sums above.
#pragma unroll 1
    for (u32 e = blockDim.x - 1 - threadIdx.x; args.tokens_per_expert != nullptr && e < args.layout.experts / ranks;
         e += blockDim.x) {
        i32 sum = 0;
        const auto experts_of = [&](u32 from) {
            return rows + args.layout.notify_row(from) + args.layout.notify_common_bytes();
        };
        for_counts(op, ranks, e, experts_of, [&](u32 from, u32 count) {
            sum += bounded_count(op, from, count, 0x7fffffffu - static_cast<u32>(sum));
        });
        args.rows_per_expert[e] = sum;
        args.received.note(e, sum);
    }
}

// The block: replaces each source's counts by where its rows begin in the expanded layout of this rank, where rows are
// in the order of expert, source and token. `dispatch` sends these starts with its offers. The counts, which a source
// might overwrite, are read a second time: a source that finds a wrong start checks it against the layout. Only that
// kernel of this rank reads these stores, ordered by its launch.
DEEP_EP_DEVICE void make_starts(const NotifyArgs& args, Operation& op, u32 ranks) {
#pragma unroll 1
    for (u32 e = threadIdx.x; e < args.layout.experts / ranks; e += blockDim.x) {
        // Where the expert's own rows end, less their number.
        u32 start = static_cast<u32>(args.received.expert_sums[e] - args.received.expert_rows[e]);
#pragma unroll 1
        for (u32 from = 0; from < ranks; ++from) {
            if (!op.present(from)) continue;
            u8* const slice = op.local_region() + args.layout.notify_row(from) + args.layout.notify_common_bytes();
            const u32 rows = device::read_once(reinterpret_cast<u32*>(slice)[e]);
            reinterpret_cast<u32*>(slice)[e] = start;
            start += rows;
        }
    }
}

// The block: the half of the exchange that waits for the first kernels of the peers.
DEEP_EP_DEVICE void take_counts(const NotifyArgs& args, Operation& op, u32 ranks, u32* tokens) {
    if (!receive_counts(args, op, ranks, tokens)) return;
    op.ended(Stage::kCounts);
    make_plan(args, op, ranks, tokens);
    if (!op.sync_block()) return;
    op.ended(Stage::kPlan);
    const auto rows_from = [&](u32 from) {
        const i32* const sums = args.plan.rank_prefix + op.rank();
        return sums[from * ranks] - (from == 0 ? 0 : sums[(from - 1) * ranks]);
    };
    if (device::warp() == 0) store_received(args.received, args.layout.experts / ranks, rows_from);
    // The host polls this flag and reads the counts once it is set. Litmus: host_flag.
    if (threadIdx.x == 0) device::store_release<Scope::kSystem>(&args.call.outcome->counts_ready, 1u);
    if (args.received.starts == 0 || !op.sync_block()) return;  // the first warp's sums are complete
    make_starts(args, op, ranks);
}

// Works with any grid size. The last block to finish its part exchanges the counts, or only sends those of this rank.
template <class Shape>
DEEP_EP_KERNEL void notify(DEEP_EP_ARGUMENT const NotifyArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    const auto shape = Shape::of(args.shape);
    const u32 ranks = shape.ranks();

    const NotifyShared at({ranks, 0, shape.topk(), device::warps(), 0});
    const CheckedIds ids = checked_ids(args, shape.topk());
    if (ids.checked_here()) check_ids(op, ids, reinterpret_cast<i32*>(at.checked.in(shared)));
    const u32 blocks = ids.numbering_blocks();
    if (blockIdx.x < blocks && !number_all(op, {args, op, ranks}, blocks, at.counts.in(shared))) return;
    op.ended(Stage::kNumber);
    if (!op.last_to_finish()) return;

    if (threadIdx.x == 0) op.take_number(wire::Kind::kDispatch, args.arguments);
    __syncthreads();
    op.read_number();
    if (!op.await_free()) return;
    write_counts(args, op, ranks);
    if (fabric::kRoutes != 0 && args.layout.has_remote != 0) put_counts(args, op, ranks);
    op.ended(Stage::kSignal);
    if (args.finish_later == 0) take_counts(args, op, ranks, at.tokens.in(shared));
}

// Launched to finish a dispatch that was begun earlier. One block. On a CUDA stream, a wait for peers holds up
// everything queued after it. Therefore a kernel launched by a begin waits for no peer's begin, and each rank may
// interleave begins with finishes in its own order (P1).
template <class Shape>
DEEP_EP_KERNEL void counts(DEEP_EP_ARGUMENT const NotifyArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    const u32 ranks = Shape::of(args.shape).ranks();
    const NotifyShared at({ranks, 0, 0, device::warps(), 0});
    take_counts(args, op, ranks, at.tokens.in(shared));
}

struct NotifyKernel {
    static constexpr const char* kName = "notify";
    using Args = NotifyArgs;
    template <class Shape>
    static constexpr auto kEntry = notify<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return NotifyShared(block).bytes; }
};

struct CountsKernel {
    static constexpr const char* kName = "counts";
    using Args = NotifyArgs;
    template <class Shape>
    static constexpr auto kEntry = counts<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return NotifyShared(block).bytes; }
};

}  // namespace deep_ep
