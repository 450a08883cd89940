// The way a PE's host thread reaches the other PEs: near ones through their heaps, far ones by requests on NVSHMEM's
// own queue pairs, interleaved with those of kernels that use the same queue pairs.
//
// Each heap reserves space before its allocations. It holds, for every PE, a word that it raises with each barrier, a
// word that its foreign posts add to, and a row that these write.
#include <chrono>
#include <thread>

#include "pe.h"

namespace nvshmem_double {
namespace {

namespace mlx5 = deep_ep::wire::mlx5;

constexpr uint64_t kWordBytes = 16, kRowBytes = 256;
static_assert(kMaxPes * (kWordBytes + kRowBytes) <= Heap::kReserved);

}  // namespace

// A place in a far PE's heap, and its counterpart here.
struct Pe::Target {
    uint64_t there;
    uint32_t remote_key;  // big endian, like all keys
    uint64_t here;
    uint32_t key;
};

uint64_t Pe::reserved_word(int pe) const { return static_cast<uint64_t>(pe) * kWordBytes; }
uint64_t Pe::reserved_row(int pe) const { return (kMaxPes * kWordBytes) + static_cast<uint64_t>(pe) * kRowBytes; }

QueueRow Pe::row(int peer, int turn) const {
    const int queue = turn % settings_.rcs, nic = turn / settings_.rcs % settings_.nics;
    return {golden_, states_->address_of(states_->index(peer, queue, nic))};
}

Pe::Target Pe::target(const QueueRow& queue, int peer, uint64_t offset) const {
    const int chunk = static_cast<int>(offset >> settings_.chunk_log2), nic = static_cast<int>(queue.nic());
    return {Nics::remote_heap(peer) + offset, mlx5::big(nics_->remote_key(chunk, peer, nic)),
            reinterpret_cast<uint64_t>(heap_->base()) + offset, mlx5::big(nics_->key(chunk, nic))};
}

// The word receives the number of the barrier, or is incremented: both give the same value.
void Pe::post_arrival(int peer) {
    const std::shared_lock<std::shared_mutex> here(table_);
    QueueRow queue = row(peer, static_cast<int>(barriers_ % 1000));
    const Target word = target(queue, peer, reserved_word(pe_));
    const uint64_t index = queue.reserve(1, settings_.seconds);
    mlx5::Block block{};
    block.remote = mlx5::remote_address(word.there, word.remote_key);
    if (barriers_ % 2 == 0) {
        block.control = mlx5::control(mlx5::kRdmaWrite, index, queue.number(), mlx5::kUnitsOfWrite, true);
        block.inlined = mlx5::inline_word(barriers_);
    } else {
        block.control = mlx5::control(mlx5::kFetchAdd, index, queue.number(), mlx5::kUnitsOfFetchAdd, true);
        block.atomic = mlx5::fetch_add(1);
        block.returned = mlx5::data(queue.returned(), queue.returned_key(), sizeof(uint64_t));
    }
    queue.write(index, block);
    queue.submit(index, index + 1, settings_.seconds);
}

// The requests of a put with a signal: a write without a completion, and an atomic with one.
void Pe::post_pair(int peer, int turn) {
    const std::shared_lock<std::shared_mutex> here(table_);
    QueueRow queue = row(peer, turn);
    const Target data = target(queue, peer, reserved_row(pe_));
    const Target word = target(queue, peer, reserved_word(pe_) + sizeof(uint64_t));
    const uint64_t index = queue.reserve(2, settings_.seconds);
    mlx5::Block block{};
    block.control = mlx5::control(mlx5::kRdmaWrite, index, queue.number(), mlx5::kUnitsOfWrite, false);
    block.remote = mlx5::remote_address(data.there, data.remote_key);
    block.data = mlx5::data(data.here, data.key, kRowBytes);
    queue.write(index, block);
    block = {};
    block.control = mlx5::control(mlx5::kFetchAdd, index + 1, queue.number(), mlx5::kUnitsOfFetchAdd, true);
    block.remote = mlx5::remote_address(word.there, word.remote_key);
    block.atomic = mlx5::fetch_add(1);
    block.returned = mlx5::data(queue.returned(), queue.returned_key(), sizeof(uint64_t));
    queue.write(index + 1, block);
    queue.submit(index, index + 2, settings_.seconds);
}

// For all queue pairs, including those that others post to.
void Pe::quiet() {
    if (!settings_.ibgda || settings_.rcs == 0) return;
    const std::shared_lock<std::shared_mutex> here(table_);
    for (int peer = 0; peer < pes_; ++peer) {
        if (peer == pe_) continue;
        for (int turn = 0; turn < settings_.rcs * settings_.nics; ++turn) row(peer, turn).quiet(settings_.seconds);
        for (int n = 0; n < states_->created(); ++n) {
            const auto index = static_cast<uint64_t>(states_->handle(n) + peer);
            QueueRow(golden_, states_->address_of(index)).quiet(settings_.seconds);
        }
    }
}

void Pe::barrier() {
    bool any_far = false;
    for (int peer = 0; peer < pes_; ++peer) any_far |= far(peer);
    if (any_far && (!settings_.ibgda || settings_.rcs == 0)) return meeting_.meet("nvshmem_barrier_all");
    quiet();
    ++barriers_;
    for (int peer = 0; peer < pes_; ++peer) {
        if (far(peer)) {
            post_arrival(peer);
        } else {
            // Release: pairs with the acquire below on that PE.
            auto* const word = reinterpret_cast<uint64_t*>(heap_->near(peer) + reserved_word(pe_));
            __atomic_store_n(word, barriers_, __ATOMIC_RELEASE);
        }
    }
    await_arrivals();
    quiet();
    nics_->check();
}

void Pe::await_arrivals() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(settings_.seconds);
    for (int peer = 0; peer < pes_; ++peer) {
        const auto* const word = reinterpret_cast<const uint64_t*>(heap_->base() + reserved_word(peer));
        // Acquire: pairs with the release of the near PE, or of the NIC that placed what that PE sent earlier.
        while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < barriers_) {
            nics_->check();
            if (std::chrono::steady_clock::now() > until) {
                throw Failure(kInternal, "nvshmem_barrier_all: timed out waiting for PE " + std::to_string(peer));
            }
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
}

void Pe::post_foreign(int count) {
    if (!settings_.ibgda || settings_.rcs == 0) throw Failure(kNotSupported, "foreign posts: IBGDA is off");
    for (int turn = 0; turn < count; ++turn) {
        for (int peer = 0; peer < pes_; ++peer) {
            if (peer != pe_) post_pair(peer, turn);
        }
    }
    nics_->check();
}

}  // namespace nvshmem_double
