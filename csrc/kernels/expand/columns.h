// scale_columns: copies the scales of received rows to where consecutive rows are adjacent, as grouped GEMMs read them.
// It runs after the dispatch kernel of the same operation; no other rank is involved.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"

namespace deep_ep {

// Copied at launch. Pointers are device pointers.
struct ScaleColumnsArgs {
    CallArgs call;
    u32 rows;
    u32 scales;       // per row, 4 bytes each
    const u32* from;  // [rows, scales]
    u32* to;          // scale i of row r is at r + i * column_stride
    u64 column_stride;
};

// Works with any grid size.
DEEP_EP_KERNEL void scale_columns(DEEP_EP_ARGUMENT const ScaleColumnsArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    const u32 step = gridDim.x * device::warps();
    for (u32 scale = blockIdx.x * device::warps() + device::warp(); scale < args.scales; scale += step) {
        u32* const column = args.to + scale * args.column_stride;
        for (u32 row = device::lane(); row < args.rows; row += device::kWarpSize) {
            column[row] = args.from[u64{row} * args.scales + scale];
        }
    }
}

struct ScaleColumnsKernel : NoSharedMemory {
    static constexpr const char* kName = "scale_columns";
    static constexpr bool kOfAnyShape = true;
    using Args = ScaleColumnsArgs;
    template <class>
    static constexpr auto kEntry = scale_columns;
};

}  // namespace deep_ep
