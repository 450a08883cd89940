#include "host/network/ibgda/adopted_nic.h"

#include <algorithm>

#include "host/network/ibgda/limits.h"

namespace deep_ep::host {
namespace {

namespace mlx5 = wire::mlx5;

template <class T>
T* pointer(u64 address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

AdoptedNic::AdoptedNic(const NetworkPlace& place)
    : memory_(*place.memory), made_(place.make_queue_pairs(*place.memory, place.reached)) {
    const auto keep = [this](const auto& values) {
        const size_t bytes = values.size() * sizeof(values[0]);
        kept_.push_back(memory_.make_private(bytes));
        memory_.write(kept_.back().get(), values.data(), bytes);
        return kept_.back().get();
    };
    rings_ = memory_.make_private(made_.queue_pairs.size() * sizeof(u64));
    for (size_t i = 0; i < made_.queue_pairs.size(); ++i) {
        const MadeQueuePair& made = made_.queue_pairs[i];
        fabric::QueuePair qp{};
        qp.peer = static_cast<u32>(i / made_.queues);
        if (made.number != 0) {
            qp.ring = pointer<mlx5::Block>(made.ring);
            qp.record = pointer<u32>(made.record);
            qp.doorbell = pointer<u64>(made.doorbell);
            qp.cqe = pointer<const mlx5::Cqe>(made.cqe);
            qp.returned = made.returned;
            qp.returned_key = made.returned_key;
            qp.number = made.number;
            qp.blocks = made.blocks;
            qp.nic = qp.remote_nic = made.nic;
            qp.reserved = pointer<u64>(made.reserved);
            qp.filled = pointer<u64>(made.filled);
            qp.rung = pointer<u64>(made.rung);
            qp.completed = pointer<u64>(made.completed);
            qp.ringing = pointer<u32>(made.ringing);
            qp.rings = static_cast<u64*>(rings_.get()) + i;
        }
        queue_pairs_.push_back(qp);
    }
    fabric::Ibgda device{};
    device.queue_pairs = static_cast<fabric::QueuePair*>(keep(queue_pairs_));
    device.per_peer = made_.queues;
    device.nics = made_.nics;
    device.chunks = made_.chunks;
    device.chunk_log2 = made_.chunk_log2;
    device.key_offset = made_.key_offset;
    device.max_bytes = made_.max_bytes;
    device.heap = made_.heap;
    device.heaps = static_cast<const u64*>(keep(made_.heaps));
    device.keys = static_cast<const u32*>(keep(made_.keys));
    device.remote_keys = static_cast<const u32*>(keep(made_.remote_keys));
    device_ = memory_.make_private(sizeof(device));
    memory_.write(device_.get(), &device, sizeof(device));
}

uint64_t AdoptedNic::max_put_bytes(uint32_t pieces) const {
    u32 blocks = ~0u;
    for (const fabric::QueuePair& qp : queue_pairs_) {
        if (qp.blocks != 0) blocks = std::min(blocks, qp.blocks);
    }
    return max_bytes_of_put(blocks, made_.chunk_log2, made_.max_bytes, pieces);
}

bool AdoptedNic::idle() const {
    return std::all_of(queue_pairs_.begin(), queue_pairs_.end(),
                       [this](const fabric::QueuePair& qp) { return qp.cqe == nullptr || idle(qp); });
}

bool AdoptedNic::works() const {
    return std::none_of(queue_pairs_.begin(), queue_pairs_.end(),
                        [this](const fabric::QueuePair& qp) { return qp.cqe != nullptr && has_failed(qp); });
}

// The NIC may write the CQE meanwhile, the tail last and in a single access (`Cqe`): a copy has the old or the new
// tail, and nothing else of it is used.
mlx5::Cqe AdoptedNic::completion(const fabric::QueuePair& qp) const {
    mlx5::Cqe cqe;
    memory_.read(&cqe, qp.cqe, sizeof(cqe));
    return cqe;
}

// This includes requests of another library: after any error the queue pair executes nothing more.
bool AdoptedNic::has_failed(const fabric::QueuePair& qp) const {
    return mlx5::cqe_kind(completion(qp).tail) == mlx5::kRequestError;
}

// If another library has posted last, its requests are waited for too, but not those it posts meanwhile.
bool AdoptedNic::idle(const fabric::QueuePair& qp) const {
    // Written by kernels of this rank, which have ended, and by those of another library. No other data depends on the
    // value. It is read before the completion, which the order of the copies ensures, so the completion passed to
    // `cqe_covers` is never the older of the two.
    const u64 filled = memory_.load_word(reinterpret_cast<const uint64_t*>(qp.filled));
    const mlx5::Cqe cqe = completion(qp);
    // A queue pair that has failed sends nothing more.
    return mlx5::cqe_kind(cqe.tail) == mlx5::kRequestError || mlx5::cqe_covers(cqe.tail, filled);
}

}  // namespace deep_ep::host
