// Bulk copies between global and shared memory, carried out by the SM's copy engine, for sm_90 and later. Copies that
// belong together are issued by one thread; any thread may wait for loads.
//
// The engine accesses memory through a proxy of its own: what other instructions did before is ordered with it by
// fence_proxy(), what it did is ordered with what follows by the wait for its completion (PTX ISA, async proxy).
#pragma once

#include "device/cuda/qualifiers.h"
#include "wire/types.h"

namespace deep_ep::device::bulk {

// Where a shared variable lies in the shared window.
DEEP_EP_DEVICE u32 shared_address(const void* variable) {
    u64 address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(variable));
    return static_cast<u32>(address);
}

DEEP_EP_DEVICE void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// All accesses of this thread, and what it has learned of others', come before its later bulk copies.
DEEP_EP_DEVICE void fence_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

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

// Without a deadline: no other rank has a part in it. The instruction itself waits a while.
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

// 16 bytes of shared memory.
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

// Makes a group of the stores since the last one.
DEEP_EP_DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All groups but the latest `kPending` have read their source: it may be written again.
template <u32 kPending>
DEEP_EP_DEVICE void wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All groups are complete: what they stored is visible to this thread, and goes with what it releases.
DEEP_EP_DEVICE void wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace deep_ep::device::bulk
