// Rules of the SIMT machine, each broken by its own bug.
#pragma once

#include <atomic>

#include "../program.h"

namespace planted::misuse {

struct Args {
    u64* peer_word;
};

DEEP_EP_KERNEL void break_rule(const void* args) {
    const u32 first_half = kWarpSize / 2;
    const u32 half_mask = kFullMask >> first_half;
    if (bug("barrier counts")) barrier_or(3, (1 + warp()) * kWarpSize, false);  // line: barrier counts
    if (bug("barrier count too large")) barrier_or(3, blockDim.x + kWarpSize, false);
    if (bug("barrier never met") && warp() == 0) barrier_or(3, blockDim.x, false);  // line: barrier never met
    if (bug("mixed collectives")) {
        if (lane() < first_half)
            __syncwarp();
        else
            __any_sync(kFullMask, 1);  // line: mixed collectives
    }
    if (bug("exited lane")) {
        if (lane() == 0) return;
        __syncwarp();  // line: exited lane
    }
    if (bug("masks differ")) __ballot_sync(lane() < first_half ? kFullMask : kFullMask & ~1u, 1);
    if (bug("not in the mask")) __ballot_sync(1, 1);
    if (bug("outside the mask") && lane() < first_half) __shfl_sync(half_mask, 1u, static_cast<int>(first_half));
    if (bug("narrow scope") && threadIdx.x == 0)
        load_acquire<Scope::kDevice>(static_cast<const Args*>(args)->peer_word);  // line: narrow scope
    DEEP_EP_SHARED(u32, shared_word);
    if (bug("block scope outside a block")) add_relaxed<Scope::kBlock>(static_cast<const Args*>(args)->peer_word, 1);
    if (bug("wider scope in a block")) add_relaxed<Scope::kDevice>(&shared_word, 1);
#if defined(DEEP_EP_COPY_PER_LANE)
    u64 rows[4][2]{};
    RowCopies copies(nullptr);
    if (bug("a third row loaded ahead")) {
        for (u32 row = 0; row < 3; ++row) copies.load(rows[row], sizeof rows[row]);
    }
    if (bug("another row than the one loaded")) {
        u8* const target = reinterpret_cast<u8*>(rows[3]);
        copies.load(rows[0], sizeof rows[0]);
        copies.load(rows[1], sizeof rows[1]);
        copies.to_many(&target, 1, rows[1], sizeof rows[1], false);
    }
    copies.finish();
#endif
    __syncthreads();
}

inline void run(uint64_t seed) {
    u64 word = 0;
    std::atomic<bool> shared{false};
    Executor& executor = Executor::get();
    run_world(2, seed, [&](int rank) {
        if (rank == 1) {
            executor.share_memory(&word, sizeof word, 1);
            shared.store(true);
        }
        if (rank == 0) {
            executor.wait([&] { return shared.load(); }, "rank 1's memory");
            launch("break_rule", 0, 1, 2, break_rule, Args{&word});
        }
        executor.synchronize(rank, 0);
    });
    executor.unshare_memory(&word);
}

}  // namespace planted::misuse
