// Only posts many puts, for measuring what the fabric's part of a put costs a kernel. This is not an operation: it
// takes no number, and the words it adds to are the caller's.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/operation.h"

namespace deep_ep {

struct PostArgs {
    CallArgs call;
    u32 to;
    u32 posters;  // posting warps per block
    u32 puts;     // per poster
    u64 bytes;    // per put; a multiple of 16
    u64 source;   // in this rank's heap
    u64 target;   // in `to`'s heap: `bytes` for each poster
    u64 words;    // in `to`'s heap: one for each poster
};

// Each of the first `posters` warps of every block repeatedly puts the same bytes to a place and a word of its own.
// Therefore posters spread over the queue pairs, and each stays on one.
DEEP_EP_KERNEL void post(DEEP_EP_ARGUMENT const PostArgs args) {
    DEEP_EP_SHARED(BlockState, block);
    Operation op(args.call, &block);
    if (!op.enter()) return;
    if (device::warp() < args.posters) {
        const u64 poster = u64{blockIdx.x} * args.posters + device::warp();
        const fabric::Piece piece{args.source, args.target + poster * args.bytes, args.bytes};
        for (u32 put = 0; put < args.puts; ++put) {
            // Another warp may give up at any time: one lane decides.
            if (!broadcast(!op.failed())) break;
            if (!fabric::put_signal(op.peers(), op, args.call.ticket->completion, args.to, &piece, 1,
                                    {args.words + poster * sizeof(u64), static_cast<u32>(poster)})) {
                break;
            }
        }
    }
    op.sync_block();  // a block leaves together (P14)
}

struct PostKernel : NoSharedMemory {
    static constexpr const char* kName = "post";
    static constexpr bool kOfAnyShape = true;
    using Args = PostArgs;
    template <class>
    static constexpr auto kEntry = post;
};

}  // namespace deep_ep
