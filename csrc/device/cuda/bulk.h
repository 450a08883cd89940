// Bulk copies between global and shared memory, executed by the SM's copy engine, for sm_90 and later. Copies that
// belong together are issued by one thread; any thread may wait for loads.
//
// The engine accesses memory through its own proxy. A proxy fence orders earlier accesses by other instructions before
// its accesses; the wait for its completion orders its accesses before what follows (PTX ISA, async proxy).
#pragma once

#include "device/cuda/memory.h"
#include "wire/types.h"

namespace deep_ep::device::bulk {

DEEP_EP_DEVICE u32 shared_address(const void* variable) {
    return static_cast<u32>(device::detail::shared_address(variable));
}

DEEP_EP_DEVICE void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Order accesses of this thread to shared or to global memory, and those of other threads that it has observed, before
// its later bulk copies. Without a state space, the fence would order all memory, at device scope: some 500 cycles.
DEEP_EP_DEVICE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEEP_EP_DEVICE void fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The barrier's phase ends when these bytes have arrived.
DEEP_EP_DEVICE void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEEP_EP_DEVICE void load(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// It has no deadline, since it depends on no other rank. The instruction itself waits for a while.
DEEP_EP_DEVICE void wait(u32 barrier, u32 parity) {
    u32 ended;
    do {
        asm volatile(
            "{\n"
            ".reg .pred ended;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
            "selp.u32 %0, 1, 0, ended;\n"
            "}"
            : "=r"(ended)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (ended == 0);
}

// Reads 16 bytes of shared memory.
DEEP_EP_DEVICE void read(u32 source, u32 (&words)[4]) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(source)
                 : "memory");
}

DEEP_EP_DEVICE void store(void* target, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
                 : "memory");
}

// Makes a group of the stores since the previous one.
DEEP_EP_DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all groups but the latest `kPending` have read their source, which may then be overwritten.
template <u32 kPending>
DEEP_EP_DEVICE void wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all groups are complete: their stores are visible to this thread, and are covered by its releases.
DEEP_EP_DEVICE void wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace deep_ep::device::bulk
