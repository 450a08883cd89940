// Offers: where a rank's output (dispatch) or its published rows (combine) are, sent to every rank that is mapped (P9,
// P12).
#pragma once

#include "kernels/common/operation.h"
#include "kernels/normal/bounds.h"

namespace deep_ep {

// One thread: copies where rank r's rows begin in this rank's expanded layout to that rank. Its blocks read them after
// they acquire the signal of the offer; this thread's stores precede its own release.
DEEP_EP_DEVICE void send_starts(const wire::RegionLayout& layout, Operation& op, u32 r) {
    const auto* const from =
        reinterpret_cast<const u32*>(op.local_region() + layout.notify_row(r) + layout.notify_common_bytes());
    auto* const to =
        reinterpret_cast<u32*>(fabric::address(op.peers(), r, op.region_offset() + layout.starts(op.rank())));
    for (u32 e = 0; e < layout.experts / op.ranks(); ++e) to[e] = from[e];
}

// One thread per mapped rank: tells that rank where this rank's output is (P9).
DEEP_EP_DEVICE void send_offers(const wire::RegionLayout& layout, wire::Offer offer, Operation& op, u32 ranks) {
    offer.operation = op.number();
    offer.arguments = op.arguments();
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (!op.mapped(r) || op.failed()) continue;
        if (offer.expanded_rows != 0) send_starts(layout, op, r);
        // Rank r's blocks read it after they acquire the signal; this thread's store precedes its own release.
        *reinterpret_cast<wire::Offer*>(fabric::address(op.peers(), r, op.region_offset() + layout.offer(op.rank()))) =
            offer;
        op.signal(r, wire::kOffer);
    }
}

// Returns whether everything offered is in [begin, end), the part of the peer's heap that is for outputs and mapped
// here, and has room for this rank's rows. `slot_bytes`: of the slots of a row's choices; 0: rows have none.
// `source_words`: for each row, of the indices that an offer of a dispatch has place for.
DEEP_EP_DEVICE bool offer_fits(const wire::Offer& offer, const wire::ChunkFormat& format, u32 slot_bytes,
                               u32 source_words, const RowRange& mine, u64 begin, u64 end) {
    const bool expanded = offer.expanded_rows != 0;
    return (!expanded || slot_bytes != 0) && static_cast<u64>(mine.first) + mine.rows <= offer.rows &&
           offer.x % wire::kPieceBytes == 0 &&
           rows_fit(offer.x, expanded ? offer.expanded_rows : offer.rows, format.x_bytes, begin, end) &&
           rows_fit(offer.scales, offer.rows, format.scales_bytes, begin, end) &&
           rows_fit(offer.topk_idx, offer.rows, expanded ? slot_bytes : format.topk_idx_bytes, begin, end) &&
           rows_fit(offer.topk_weights, offer.rows, format.topk_weights_bytes, begin, end) &&
           rows_fit(offer.src_idx, offer.rows, source_words * format.src_idx_bytes, begin, end);
}

// One thread per rank: waits for that rank's offer, if it makes one. `mine` is the range of this rank's rows there.
// Returns false if rows to or from it go in chunks. `slot_bytes`, `source_words`: as in offer_fits().
DEEP_EP_DEVICE bool await_offer(const wire::RegionLayout& layout, Operation& op, u32 r, const RowRange& mine,
                                u32 slot_bytes, u32 source_words, wire::Offer& offer) {
    if (!op.mapped(r)) return false;
    if (!op.wait_signal(Phase::kOffer, wire::kOffer, r, 1)) return false;
    offer = copy_once<wire::Offer>(op.local_region() + layout.offer(r));
    if (!op.check_message(Phase::kOffer, r, offer.operation, offer.arguments)) return false;
    if (offer.visible == 0) return false;
    // Relaxed: it is raised before the launch of the operation that needs it, and never lowered.
    const u64 mapped = device::load_relaxed<Scope::kSystem>(&op.peers().mapped_bytes[r]);
    if (offer_fits(offer, layout.format, slot_bytes, source_words, mine, op.peers().heap.arena_offset(), mapped))
        return true;
    op.fail(wire::kMismatch, Phase::kBounds, static_cast<i32>(r), mapped, offer.x);
    return false;
}

}  // namespace deep_ep
