// What a gate does for the other ranks of its node in a low-latency dispatch: it tells them that rows have come.
//
// They read the rows in its region. That the NIC has written them there this rank alone may rely on: on some GPUs no
// other device sees what a NIC has written in the order in which its owner does.
#pragma once

#include "kernels/low_latency/dispatch_args.h"

namespace deep_ep::low_latency {

// All warps of all blocks. Those of the last block take the first turns, since the others have more to place.
DEEP_EP_DEVICE void pass_rows(const DispatchArgs& args, Operation& op) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 own_node = layout.node_of(op.rank()), puts = layout.row_puts, warps = gridDim.x * device::warps();
    const u32 warp = (gridDim.x - 1 - blockIdx.x) * device::warps() + device::warp();
    for (u32 i = warp; i < layout.nodes() * puts; i += warps) {
        const u32 node = i / puts, kind = wire::kChunk + i % puts, source = layout.gate(node, op.rank());
        if (node == own_node || !op.present(source)) continue;
        if (!broadcast(device::lane() == 0 && op.wait_signal(Phase::kChunk, kind, source, 1))) return;
        // The first lane has acquired what the NIC has written; the others are ordered behind it, and so is what they
        // release to ranks that acquire the source's word, as if it had been put to them.
        for (u32 local = device::lane(); local < layout.per_node; local += device::kWarpSize) {
            const u32 to = own_node * layout.per_node + local;
            if (to != op.rank() && op.present(to)) op.signal_for(to, kind, source);
        }
    }
}

}  // namespace deep_ep::low_latency
