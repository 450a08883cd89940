// A host thread and its rank's kernels: launch, result flag in memory, the next launch.
#pragma once

#include "../program.h"

namespace planted::host {

constexpr u32 kWords = 64, kRounds = 6;

struct Args {
    const u32* input;
    u32* output;
    u64* flag;
    u64 round;
};

DEEP_EP_KERNEL void add_one(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    for (u32 i = threadIdx.x; i < kWords; i += blockDim.x) a.output[i] = a.input[i] + 1;
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (bug("relaxed flag"))
        store_relaxed<Scope::kSystem>(a.flag, a.round);
    else
        store_release<Scope::kSystem>(a.flag, a.round);
}

inline void run(uint64_t seed) {
    u64 flag = 0;
    std::vector<u32> input(kWords), output(kWords);
    run_world(1, seed, [&](int) {
        for (u32 round = 1; round <= kRounds; round++) {
            for (u32 i = 0; i < kWords; i++) input[i] = round * 1000 + i;
            launch("add_one", 0, 1, 2, add_one, Args{input.data(), output.data(), &flag, round});
            const auto flagged = [&] { return __atomic_load_n(&flag, __ATOMIC_ACQUIRE) == round; };
            if (!bug("no wait")) Executor::get().wait(flagged, "the flag");
            for (u32 i = 0; i < kWords; i++)
                expect(output[i] == round * 1000 + i + 1, "round " + std::to_string(round) + " is wrong");
        }
    });
}

}  // namespace planted::host
