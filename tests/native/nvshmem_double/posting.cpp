#include "posting.h"

#include <sched.h>
#include <chrono>
#include <string>

#include "settings.h"

namespace nvshmem_double {
namespace {

namespace mlx5 = deep_ep::wire::mlx5;

constexpr uint64_t kBatch = 32;  // NVSHMEM_IBGDA_NUM_REQUESTS_IN_BATCH

template <class T>
T* pointer(const Golden& golden, uint64_t address, const char* field) {
    return reinterpret_cast<T*>(address + golden.offset(field));
}
template <class T>
T value(const Golden& golden, uint64_t address, const char* field) {
    return *pointer<T>(golden, address, field);
}

template <class Condition>
void await(const Condition& condition, double seconds, const std::string& what) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > until) throw Failure(kInternal, "timed out waiting for " + what);
        sched_yield();
    }
}

}  // namespace

QueueRow::QueueRow(const Golden& golden, uint64_t address)
    : number_(value<uint32_t>(golden, address, "QueuePair.number")),
      returned_key_(value<uint32_t>(golden, address, "QueuePair.returned_key")),
      nic_(value<uint32_t>(golden, address, "QueuePair.nic")),
      blocks_(value<uint16_t>(golden, address, "QueuePair.blocks")),
      returned_(value<uint64_t>(golden, address, "QueuePair.returned")),
      ring_(reinterpret_cast<mlx5::Block*>(value<uint64_t>(golden, address, "QueuePair.ring"))),
      record_(reinterpret_cast<uint32_t*>(value<uint64_t>(golden, address, "QueuePair.record"))),
      doorbell_(reinterpret_cast<uint64_t*>(value<uint64_t>(golden, address, "QueuePair.doorbell"))),
      reserved_(pointer<uint64_t>(golden, address, "QueuePair.reserved")),
      filled_(pointer<uint64_t>(golden, address, "QueuePair.filled")),
      rung_(pointer<uint64_t>(golden, address, "QueuePair.rung")),
      completed_(pointer<uint64_t>(golden, address, "QueuePair.completed")),
      posting_(pointer<uint32_t>(golden, address, "QueuePair.posting")) {
    const uint64_t completions = value<uint64_t>(golden, address, "QueuePair.completion");
    cqe_ = reinterpret_cast<const mlx5::Cqe*>(value<uint64_t>(golden, completions, "CompletionQueue.cqe"));
}

uint64_t QueueRow::reserve(uint64_t blocks, double seconds) {
    // Relaxed: it only hands out WQEBBs. Their contents are ordered by `filled`.
    const uint64_t begin = __atomic_fetch_add(reserved_, blocks, __ATOMIC_RELAXED);
    if (begin + blocks > blocks_) await_completed(begin + blocks - blocks_, seconds);
    return begin;
}

void QueueRow::write(uint64_t index, const mlx5::Block& block) { ring_[index & (blocks_ - 1)] = block; }

void QueueRow::submit(uint64_t begin, uint64_t end, double seconds) {
    const auto turn = [&] {
        uint64_t expected = begin;
        // Acquire: the WQEBBs of the threads before. Release: a thread that rings for WQEBBs up to here, or beyond,
        // sees them all.
        return __atomic_compare_exchange_n(filled_, &expected, end, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    };
    await(turn, seconds, "the blocks in front of " + std::to_string(begin) + " to be filled");
    // Relaxed: a thread that has reserved WQEBBs after these makes the same check once they are filled, and then sees
    // these.
    if (__atomic_load_n(reserved_, __ATOMIC_RELAXED) == end || begin / kBatch != end / kBatch) ring(end, seconds);
}

void QueueRow::ring(uint64_t end, double seconds) {
    const auto lock = [&] {
        uint32_t expected = 0;
        // Acquire: pairs with the release below by the previous holder, a kernel or another host thread.
        return __atomic_compare_exchange_n(posting_, &expected, 1u, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
    };
    await(lock, seconds, "the lock of a doorbell");
    // Relaxed: it changes only under the lock, and threads that poll it only need to know that the NIC will be
    // notified.
    if (__atomic_load_n(rung_, __ATOMIC_RELAXED) < end) {
        __atomic_store_n(rung_, end, __ATOMIC_RELAXED);
        if (record_ == nullptr) {
            // Release: the thread that rings acquires it, and with it the WQEBBs.
            __atomic_store_n(doorbell_, end, __ATOMIC_RELEASE);
        } else {
            // Release: the NIC may read this record for an earlier doorbell, and then reads the WQEBBs.
            __atomic_store_n(record_, mlx5::send_counter(end), __ATOMIC_RELEASE);
            // Release: the NIC reads the record after the doorbell, and must not find an older one.
            __atomic_store_n(doorbell_, mlx5::doorbell(number_, end), __ATOMIC_RELEASE);
        }
    }
    // Release: the next holder sees what the lock guards.
    __atomic_store_n(posting_, 0u, __ATOMIC_RELEASE);
}

void QueueRow::await_completed(uint64_t count, double seconds) {
    const auto done = [&] {
        // Acquire: WQEBBs and memory that another thread found completed may be written again.
        uint64_t known = __atomic_load_n(completed_, __ATOMIC_ACQUIRE);
        if (known >= count) return true;
        // Relaxed: until the NIC has been notified there is nothing to look for.
        if (__atomic_load_n(rung_, __ATOMIC_RELAXED) < count) return false;
        // Acquire: pairs with the NIC's release after its last access for these requests.
        const uint32_t tail = __atomic_load_n(&cqe_->tail, __ATOMIC_ACQUIRE);
        if (mlx5::cqe_kind(tail) == mlx5::kRequestError) {
            throw Failure(kInternal, "queue pair " + std::to_string(number_) +
                                         " has failed: " + mlx5::syndrome_name(cqe_->syndrome));
        }
        const uint64_t now = known + ((mlx5::cqe_index(tail) + 1 - known) & 0xffff);
        // Release: a thread that acquires it sees what this thread has acquired from the NIC. It only grows.
        while (known < now &&
               !__atomic_compare_exchange_n(completed_, &known, now, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        }
        return now >= count;
    };
    await(done, seconds, "block " + std::to_string(count) + " of queue pair " + std::to_string(number_));
}

void QueueRow::quiet(double seconds) {
    // Acquire: everything that is valid by now counts, whichever thread posted it.
    await_completed(__atomic_load_n(filled_, __ATOMIC_ACQUIRE), seconds);
}

}  // namespace nvshmem_double
