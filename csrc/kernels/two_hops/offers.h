// Offers inside a node: where a rank's output (dispatch) or its published rows (combine) are, and where in them the
// rows of each of the receiver's lines begin (P9, P12).
#pragma once

#include "kernels/normal/offers.h"
#include "kernels/two_hops/plan.h"

namespace deep_ep::two_hops {

// What this rank receives from a rank according to its plan, copied once and checked against bounds.
struct Received {
    u32 first;  // index of the rank's first row among those received here
    u32 rows;
    u32 node_rows;  // of the row stream that they belong to
};

// The block: copies what this rank receives into shared memory. `most` is the number of rows that there is room for.
DEEP_EP_DEVICE_CALL void find_received(Operation& op, const Plan& plan, u32 most, Received* received) {
    const auto* const prefix = const_cast<const volatile i32*>(plan.rank_prefix);
    const auto* const node_rows = const_cast<const volatile i32*>(plan.node_rows);
    for (u32 s = threadIdx.x; s < op.ranks(); s += blockDim.x) {
        const i64 begin = s == 0 ? 0 : prefix[s - 1], end = prefix[s], of_node = node_rows[s];
        const bool fits = begin >= 0 && begin <= end && end <= most && end - begin <= of_node &&
                          of_node <= static_cast<i64>(wire::kMaxTokens) && (op.present(s) || of_node == 0);
        if (!fits) op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(s), most, static_cast<u64>(end));
        received[s] = fits ? Received{static_cast<u32>(begin), static_cast<u32>(end - begin), static_cast<u32>(of_node)}
                           : Received{};
    }
}

// Node rows of this rank's row streams, and their chunks: those it sends, by node, and those of its lines.
struct Stream {
    u32 sent;
    u32 sent_chunks;  // 0: no rank of the node is left
    u32 begin;        // index of the first forwarded one, among all that this rank forwards
    u32 forwarded;
    u32 forwarded_chunks;  // 0: there is no such row stream
};

// The block: the same for the row streams. `tokens` is the number of this rank's tokens.
DEEP_EP_DEVICE_CALL void find_streams(Operation& op, const Plan& plan, const wire::TwoHopSizes& sizes, const Place& me,
                                      u32 tokens, Stream* streams) {
    const auto* const sent = const_cast<const volatile i32*>(plan.sent);
    const auto* const prefix = const_cast<const volatile i32*>(plan.forwarded);
    for (u32 line = threadIdx.x; line < sizes.lines(); line += blockDim.x) {
        const bool sends = line < sizes.nodes && (line == me.node || me.forwarder(line) != wire::kNoRank);
        const bool passes = me.origin(line) != wire::kNoRank;
        const i64 rows = line < sizes.nodes ? sent[line] : 0, begin = line == 0 ? 0 : prefix[line - 1];
        const i64 end = prefix[line];
        const bool fits = rows >= 0 && rows <= (sends ? tokens : 0) && begin >= 0 && begin <= end &&
                          end <= plan.table_rows && (passes || begin == end) &&
                          (line != me.node || end - begin == rows);
        if (!fits) {
            op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(sizes.node_of(line)), plan.table_rows,
                    static_cast<u64>(end));
            streams[line] = {};
            continue;
        }
        const u32 to_send = static_cast<u32>(rows), to_pass = static_cast<u32>(end - begin);
        streams[line] = {to_send, sends ? sizes.chunks(to_send) : 0, static_cast<u32>(begin), to_pass,
                         passes ? sizes.chunks(to_pass) : 0};
    }
}

// One thread of a kernel: gives up if ranks are masked but the region's layout does not allow for that, since the graph
// was captured before.
DEEP_EP_DEVICE_CALL void check_roles(Operation& op, const wire::TwoHopSizes& sizes) {
    if (sizes.roles != 1) return;
    for (u32 word = 0; word < wire::RankMask::used(op.ranks()); ++word) {
        const u64 bits = op.environment().mask.words[word];
        if (bits == 0) continue;
        const u32 rank = wire::RankMask::lowest(word, bits);
        return op.fail(wire::kOutdated, Phase::kMask, static_cast<i32>(rank), 0, 0);
    }
}

// One thread per rank of the node, after the barrier that follows find_received(): tells that rank where this rank's
// output is, and where in it the rows of that rank's lines are.
DEEP_EP_DEVICE_CALL void send_offers(const wire::TwoHopLayout& layout, wire::Offer offer, const Received* received,
                                     Operation& op, const Place& me) {
    offer.operation = op.number();
    offer.arguments = op.arguments();
    for (u32 f = threadIdx.x; f < me.per_node; f += blockDim.x) {
        if (op.failed() || !me.has(f)) continue;
        // The rank's blocks read it after they acquire the signal; this thread's stores precede its own release.
        u8* const message = fabric::address(op.peers(), me.near(f), op.region_offset() + layout.offers.at(me.local));
        *reinterpret_cast<wire::Offer*>(message) = offer;
        auto* const rows = reinterpret_cast<wire::StreamRows*>(message + sizeof(wire::Offer));
        const Place theirs = Place::of(me.near(f), layout, me.mask);
        for (u32 line = 0; line < layout.lines(); ++line) {
            const u32 origin = theirs.origin(line);
            rows[line] = {};
            if (origin != wire::kNoRank) rows[line] = {received[origin].first, received[origin].rows};
        }
        op.signal(me.near(f), wire::kOffer);
    }
}

// One thread: waits for the offer of a rank of the node, and copies the ranges of this rank's lines. Returns false if
// the offered memory cannot be stored into, or read, from here, if the rank is left out, or if the operation fails.
// `own_rows` is the number of this rank's rows, which it uses in place whatever the message says.
DEEP_EP_DEVICE bool await_offer(const wire::TwoHopLayout& layout, const wire::ChunkFormat& format, Operation& op,
                                const Place& me, u32 local, u32 own_rows, wire::Offer& offer, wire::StreamRows* rows) {
    const u32 r = me.near(local);
    for (u32 line = 0; line < layout.lines(); ++line) rows[line] = {};
    if (!me.has(local)) return false;
    if (!op.wait_signal(Phase::kOffer, wire::kOffer, r, 1)) return false;
    const u8* const message = op.local_region() + layout.offers.at(local);
    offer = copy_once<wire::Offer>(message);
    if (!op.check_message(Phase::kOffer, r, offer.operation, offer.arguments)) return false;
    const u32 theirs = offer.visible != 0 ? offer.rows : 0x7fffffffu, most = local == me.local ? own_rows : theirs;
    for (u32 line = 0; line < layout.lines(); ++line) {
        const auto range = copy_once<wire::StreamRows>(message + sizeof(wire::Offer) + line * sizeof(wire::StreamRows));
        if (u64{range.first} + range.rows > most) {
            op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), most, u64{range.first} + range.rows);
            return false;
        }
        rows[line] = range;
    }
    if (offer.visible == 0) return false;
    // Relaxed: it is raised before the launch of the operation that needs it, and never lowered.
    const u64 mapped = device::load_relaxed<Scope::kSystem>(&op.peers().mapped_bytes[r]);
    if (offer_fits(offer, format, 0, 1, {0, 0}, op.peers().heap.arena_offset(), mapped)) return true;
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), mapped, offer.x);
    return false;
}

}  // namespace deep_ep::two_hops
