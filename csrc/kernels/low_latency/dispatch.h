// Low-latency dispatch: every token's row goes to every rank that holds one of its experts, without a prior exchange of
// counts. A row may go to a node only once: wire/low_latency.h.
//
// The waits, in this order so that no cycle can form (P11):
//
//   free of every rank   given at the end of an earlier operation
//   rows to forward      after the senders' halves, which wait for nothing but `free`
//   routing, rows        after the senders' halves or their forwarders' part; a hook launches neither
#pragma once

#include "kernels/low_latency/dispatch_forward.h"
#include "kernels/low_latency/dispatch_receive.h"
#include "kernels/low_latency/dispatch_send.h"

namespace deep_ep::low_latency {

// Works with any grid size.
template <class Shape>
DEEP_EP_KERNEL void dispatch(DEEP_EP_ARGUMENT const DispatchArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_DYNAMIC_SHARED(u8, shared);
    Operation op(args.call, &block);
    const auto shape = Shape::of(args.shape);
    const DispatchScratch scratch(args, shape.ranks(), shape.topk(), shared);
    if ((args.phases & kSend) != 0) {
        clear_counts(scratch.starts, args.layout.experts_per_rank * shape.ranks());
        if (!op.enter_first(wire::Kind::kLowLatencyDispatch, args.arguments, shape.ranks())) return;
        if (lacks_forwarders(op, args.layout)) return;
        if (!send_dispatch(args, op, shape, scratch)) return;
    } else if (!op.enter()) {
        return;
    }
    if (kForwards && (args.phases & kForward) != 0) forward_rows(args, op);
    if ((args.phases & kReceive) != 0) receive_dispatch(args, op, shape, scratch);
}

struct DispatchKernel {
    static constexpr const char* kName = "low_latency_dispatch";
    using Args = DispatchArgs;
    template <class Shape>
    static constexpr auto kEntry = dispatch<Shape>;
    static constexpr u32 shared_bytes(const BlockSizes& block) { return DispatchShared(block).bytes; }
};

}  // namespace deep_ep::low_latency
