// Offers: where a rank has put its output (dispatch), or its published rows (combine), told to every rank that is
// mapped (P9, P12).
#pragma once

#include "kernels/operation.h"

namespace deep_ep {

// One thread per mapped rank: tells it where this rank's output lies (P9).
DEEP_EP_DEVICE void send_offers(const wire::RegionLayout& layout, wire::Offer offer, Operation& op, u32 ranks) {
    offer.operation = op.number();
    offer.arguments = op.arguments();
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        if (!op.mapped(r) || op.failed()) continue;
        // Read by rank r's blocks after they acquire the signal; this thread's store precedes its own release.
        *reinterpret_cast<wire::Offer*>(fabric::address(op.peers(), r, op.region_offset() + layout.offer(op.rank()))) =
            offer;
        op.signal(r, wire::kOffer);
    }
}

// One thread per rank: waits for its offer, if it makes one. Null: rows to or from it go in chunks.
DEEP_EP_DEVICE const wire::Offer* await_offer(const wire::RegionLayout& layout, Operation& op, u32 r) {
    if (!op.mapped(r)) return nullptr;
    if (!op.wait_signal(Phase::kOffer, wire::kOffer, r, 1)) return nullptr;
    const auto* offer = reinterpret_cast<const wire::Offer*>(op.local_region() + layout.offer(r));
    if (!op.check_message(Phase::kOffer, r, offer->operation, offer->arguments)) return nullptr;
    return offer->visible != 0 ? offer : nullptr;
}

}  // namespace deep_ep
