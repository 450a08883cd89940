// A kernel that changes one word again and again, while the host changes it too.
#pragma once

#include "device/device.h"
#include "kernels/common/kernel.h"

namespace gpu_lab {

using deep_ep::u32;
using deep_ep::u64;

struct AbortWordArgs {
    u64* word;
    const u64* stop;  // in host memory: the host sets it
    u64* done;        // in host memory: set when the kernel ends, and read by the host only then
    u64* taken;       // in host memory: how often an exchange has found a value
    u64 exchanges;    // 0: adds 0, which must not change the word; 1: exchanges it with 0
    u64 timeout_ns;
};

__global__ void change_word(const AbortWordArgs args) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const u64 deadline = deep_ep::device::now_ns() + args.timeout_ns;
    u64 taken = 0;
    for (u32 turn = 1;; ++turn) {
        u64 before;
        if (args.exchanges != 0) {
            asm volatile("atom.relaxed.sys.exch.b64 %0, [%1], 0;" : "=l"(before) : "l"(args.word) : "memory");
            taken += before != 0;
        } else {
            asm volatile("atom.relaxed.sys.add.u64 %0, [%1], 0;" : "=l"(before) : "l"(args.word) : "memory");
        }
        constexpr u32 kBetweenLooks = 64;
        if (turn % kBetweenLooks != 0) continue;
        u64 stop;
        asm volatile("ld.relaxed.sys.b64 %0, [%1];" : "=l"(stop) : "l"(args.stop) : "memory");
        if (stop != 0 || deep_ep::device::now_ns() > deadline) break;
    }
    *args.taken = taken;
    __threadfence_system();  // the host reads `taken` after it has seen `done`
    *reinterpret_cast<volatile u64*>(args.done) = 1;
}

}  // namespace gpu_lab
