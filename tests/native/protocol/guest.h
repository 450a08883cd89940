// A thread of another library that posts to a queue pair of ours in its own way, as fabric/ibgda.h assumes: it reserves
// WQEBBs before there is room, waits without ringing, and leaves the doorbell to others up to a batch. Its waits have
// no timeout of their own: the executor ends a run in which no fiber can continue.
#pragma once

#include "device/device.h"
#include "fabric/ibgda.h"

namespace protocol {

using namespace deep_ep;
using namespace deep_ep::device;

class Guest {
  public:
    Guest(const fabric::Ibgda& net, const fabric::QueuePair& queue, u32 batch)
        : net_(net), queue_(queue), batch_(batch) {}

    // Reserves WQEBBs, to be written from the returned one on, once they are free.
    u64 take(u32 count) {
        // Relaxed: it only hands out WQEBBs; `filled` orders their contents.
        const u64 begin = fetch_add_relaxed<Scope::kDevice>(queue_.reserved, u64{count});
        if (begin + count > queue_.blocks) await_done(begin + count - queue_.blocks, "a guest's room");
        return begin;
    }

    // Requests no completion.
    void write(u64 index, u64 source, u64 target, u32 bytes) {
        const auto keys = fabric::ibgda::Keys::of(net_, queue_, source, target);
        fabric::ibgda::write_request(fabric::ibgda::Ring::of(queue_), index, net_.heap + source,
                                     net_.heaps[queue_.peer] + target, keys, bytes);
    }
    void add(u64 index, u64 offset) {
        const u32 key = fabric::ibgda::remote_key(net_, queue_, offset);
        fabric::ibgda::add_request(fabric::ibgda::Ring::of(queue_), queue_, index, net_.heaps[queue_.peer] + offset,
                                   key);
    }

    // In order; rings for nothing.
    void fill(u64 begin, u64 end) {
        const WaitNote note{"a guest's turn", -1, begin, queue_.filled};
        do {  // Relaxed: the CAS checks again. It acquires the earlier WQEBBs, and releases these with them.
            spin_until([&] { return load_relaxed<Scope::kDevice>(queue_.filled) == begin; }, cpu::kForever, &note);
        } while (cas_acq_rel<Scope::kDevice>(queue_.filled, begin, end) != begin);
    }
    void publish(u64 begin, u64 end) {
        fill(begin, end);
        // Relaxed: a thread that has reserved later WQEBBs makes this check itself.
        const bool last = load_relaxed<Scope::kDevice>(queue_.reserved) == end;
        if (last || begin / batch_ != end / batch_) ring(end);
    }

    // Acquire: all that is valid by now counts, whichever thread posted it.
    void quiet() { await_done(load_acquire<Scope::kDevice>(queue_.filled), "a guest's requests"); }

  private:
    // Checks the NIC's progress only once the doorbell has been rung for all of it.
    void await_done(u64 count, const char* what) {
        const WaitNote note{what, -1, count, queue_.completed};
        // Acquire: pairs with the CAS of a thread, ours or a kernel's, that has seen the completion.
        u64 known = load_acquire<Scope::kDevice>(queue_.completed);
        if (known >= count) return;
        // Relaxed: it only says that the NIC will be notified of them.
        spin_until([&] { return load_relaxed<Scope::kDevice>(queue_.rung) >= count; }, cpu::kForever, &note);
        u64 now = known;
        spin_until(
            [&] {
                known = load_acquire<Scope::kDevice>(queue_.completed);
                // Acquire: pairs with the NIC's release after its last access.
                const u32 tail = load_acquire<Scope::kSystem>(&queue_.cqe->tail);
                now = known + ((wire::mlx5::cqe_index(tail) + 1 - known) & 0xffff);
                return now >= count;
            },
            cpu::kForever, &note);
        while (known < now) {
            const u64 before = known;
            // Release: a thread that acquires it may write where the NIC has read.
            known = cas_acq_rel<Scope::kDevice>(queue_.completed, before, now);
            if (known == before) break;
        }
    }

    void ring(u64 end) {
        do {  // Relaxed: the CAS checks again, and acquires what the lock guards.
            spin_until([&] { return load_relaxed<Scope::kDevice>(queue_.ringing) == 0; }, cpu::kForever, nullptr);
        } while (cas_acq_rel<Scope::kDevice>(queue_.ringing, 0u, 1u) != 0);
        // Relaxed: it changes only under the lock.
        if (load_relaxed<Scope::kDevice>(queue_.rung) < end) {
            store_relaxed<Scope::kDevice>(queue_.rung, end);
            // Release: the NIC may read the record for an earlier doorbell, and then the WQEBBs; it reads the record
            // after the doorbell.
            store_release<Scope::kSystem>(queue_.record, wire::mlx5::send_counter(end));
            store_release<Scope::kSystem>(queue_.doorbell, wire::mlx5::doorbell(queue_.number, end));
        }
        // Release: the next holder sees what the lock guards.
        store_release<Scope::kDevice>(queue_.ringing, 0u);
    }

    const fabric::Ibgda& net_;
    const fabric::QueuePair queue_;
    const u32 batch_;
};

}  // namespace protocol
