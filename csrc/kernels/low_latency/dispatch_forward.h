// The work of a forwarder for the other ranks of its node in a low-latency dispatch: it notifies them that rows have
// arrived.
//
// The NIC signals only the forwarder, and only the owner of memory may rely on such a signal: some GPUs do not order a
// NIC's writes for other devices. Therefore the forwarder acquires the signal and releases one of its own to each rank
// of its node, which loads the rows from the forwarder's region.
#pragma once

#include "kernels/low_latency/dispatch_args.h"

namespace deep_ep::low_latency {

// All warps of all blocks. The warps of the last block take the first turns, since the others have more rows to place.
DEEP_EP_DEVICE void forward_rows(const DispatchArgs& args, Operation& op) {
    const wire::LowLatencyLayout& layout = args.layout;
    const u32 own_node = layout.node_of(op.rank()), puts = layout.row_puts, warps = gridDim.x * device::warps();
    const u32 warp = (gridDim.x - 1 - blockIdx.x) * device::warps() + device::warp();
    for (u32 i = warp; i < layout.nodes() * puts; i += warps) {
        const u32 node = i / puts, kind = wire::kChunk + i % puts, source = layout.forwarder(node, op.rank());
        if (node == own_node || !op.present(source)) continue;
        if (!broadcast(device::lane() == 0 && op.wait_signal(Phase::kChunk, kind, source, 1))) return;
        // The first lane's acquire (system scope) reads the NIC's add, so it sees the rows. broadcast() orders the
        // other lanes after it. Each lane's add is a release at system scope, and releases are cumulative: a rank that
        // acquires the row stream's word sees the rows in this region.
        for (u32 local = device::lane(); local < layout.per_node; local += device::kWarpSize) {
            const u32 to = own_node * layout.per_node + local;
            if (to != op.rank() && op.present(to)) op.signal_for(to, wire::kStreamChunk + i % puts, source);
        }
    }
}

}  // namespace deep_ep::low_latency
