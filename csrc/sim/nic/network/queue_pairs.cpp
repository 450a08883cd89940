#include "sim/nic/network/queue_pairs.h"

#include <cstring>

#include "host/network/ibgda/limits.h"

namespace deep_ep::host {
namespace {

namespace mlx5 = wire::mlx5;

// Addresses for NICs are unrelated to those of this process, so that a kernel that mixes them up is caught.
u64 heap_address(int rank) { return (static_cast<u64>(rank) + 1) << 44; }
u64 returned_address(u32 queue) { return 1ull << 60 | static_cast<u64>(queue) << 12; }
// Odd keys are those of heaps, the same on every rank; even ones are those of the word of a queue pair.
u32 heap_key(u64 number) { return static_cast<u32>(number << 1 | 1); }
u32 returned_key(u32 queue) { return queue << 1; }

constexpr u64 kMaxKeys = 1u << 24;

}  // namespace

NicQueuePairs::NicQueuePairs(const NetworkPlace& place, nic::SendQueue::Random random, std::function<uint64_t()> now_ns)
    : options_(place.nic),
      now_ns_(std::move(now_ns)),
      ranks_(static_cast<u32>(place.heaps.size())),
      allocator_(*place.memory) {
    fabric::Ibgda device{};
    make_keys(place, device);
    make_queues(place, random, device);
    device_ = make_private<fabric::Ibgda>({device});
}

void NicQueuePairs::make_keys(const NetworkPlace& place, fabric::Ibgda& device) {
    const u64 chunk = 1ull << options_.chunk_log2, heap_bytes = place.layout.bytes(), before = options_.key_offset;
    const u32 chunks = static_cast<u32>((before + heap_bytes + chunk - 1) / chunk);
    const u64 keys = u64{ranks_} * chunks * options_.nics;
    if (keys > kMaxKeys) {
        throw std::invalid_argument("chunk_log2=" + std::to_string(options_.chunk_log2) + ": heaps of " +
                                    std::to_string(heap_bytes) + " bytes would need " + std::to_string(keys) +
                                    " memory keys, expected at most " + std::to_string(kMaxKeys));
    }
    std::vector<u64> addresses;
    std::vector<u32> by_chunk;
    for (u32 r = 0; r < ranks_; ++r) {
        addresses.push_back(heap_address(static_cast<int>(r)));
        for (u32 c = 0; c < chunks; ++c) {
            for (u32 n = 0; n < options_.nics; ++n) {
                const u32 key = heap_key((u64{r} * chunks + c) * options_.nics + n);
                // The part of the chunk that is in the heap.
                const u64 begin = std::max(c * chunk, before) - before;
                const u64 end = std::min((c + 1) * chunk - before, heap_bytes);
                memory_.add(key, {static_cast<int>(r), addresses[r] + begin, end - begin, place.heaps[r] + begin});
                by_chunk.push_back(mlx5::big(key));
            }
        }
    }
    heap_addresses_ = make_private(addresses);
    keys_ = make_private(by_chunk);
    device.nics = options_.nics;
    device.chunks = chunks;
    device.chunk_log2 = options_.chunk_log2;
    device.key_offset = before;
    device.max_bytes = options_.max_bytes;
    device.heap = addresses[static_cast<size_t>(place.rank)];
    device.heaps = heap_addresses_.get();
    // A chunk has the same key for local and for remote access.
    device.keys = keys_.get() + static_cast<size_t>(place.rank) * chunks * options_.nics;
    device.remote_keys = keys_.get();
}

void NicQueuePairs::make_queues(const NetworkPlace& place, const nic::SendQueue::Random& random,
                                fabric::Ibgda& device) {
    const u32 per_peer = options_.queues_per_peer, count = ranks_ * per_peer;
    std::vector<fabric::QueuePair> queue_pairs(count);
    queues_.resize(count);
    queue_memory_ = std::static_pointer_cast<QueueMemory>(allocator_.make_polled(count * sizeof(QueueMemory)));
    counts_ = std::static_pointer_cast<Counts>(allocator_.make_private(count * sizeof(Counts)));
    size_t blocks = 0;
    for (const bool far : place.reached) blocks += far ? size_t{per_peer} * options_.blocks : 0;
    rings_ = std::static_pointer_cast<mlx5::Block>(allocator_.make_shared(blocks * sizeof(mlx5::Block)));
    std::memset(static_cast<void*>(rings_.get()), nic::kPoison, blocks * sizeof(mlx5::Block));
    const observe::Accessor nic{observe::Kind::kNic, this, static_cast<u32>(place.rank)};
    observe::share(nic, queue_memory_.get(), count * sizeof(QueueMemory));
    observe::share(nic, rings_.get(), blocks * sizeof(mlx5::Block));
    nic::SendQueue::Tell tell;
    if (options_.traced) {
        tell = [this](nic::Message message) {
            message.time_ns = now_ns_();
            const std::lock_guard<std::mutex> guard(mutex_);
            messages_.push_back(message);
        };
    }
    mlx5::Block* ring = rings_.get();
    for (u32 i = 0; i < count; ++i) {
        const u32 peer = i / per_peer;
        fabric::QueuePair& qp = queue_pairs[i];
        qp.peer = peer;
        if (!place.reached[peer]) continue;
        QueueMemory& own = queue_memory_.get()[i];
        std::memset(static_cast<void*>(&own.cqe), 0xff, sizeof(own.cqe));
        // The number is unrelated to the index of the queue pair in the table.
        const nic::Connection connection{place.rank, static_cast<int>(peer), 0x40 + 7 * i, place.closing(peer)};
        memory_.add(returned_key(i),
                    {place.rank, returned_address(i), sizeof(u64), reinterpret_cast<u8*>(&own.returned)});
        qp.ring = ring;
        qp.record = &own.record.send;
        qp.doorbell = &own.doorbell;
        qp.cqe = &own.cqe;
        qp.returned = returned_address(i);
        qp.returned_key = mlx5::big(returned_key(i));
        qp.number = connection.number;
        qp.blocks = options_.blocks;
        qp.nic = i % options_.nics;
        qp.remote_nic = static_cast<u32>(place.rank) % options_.nics;
        // Only addresses are taken: the host may be unable to access what they point to.
        Counts* const counts = counts_.get() + i;
        qp.reserved = &counts->reserved;
        qp.filled = &counts->filled;
        qp.rung = &counts->rung;
        qp.completed = &counts->completed;
        qp.ringing = &counts->ringing;
        qp.rings = &counts->rings;
        const nic::SharedQueue shared{ring, &own.record, &own.doorbell, &own.cqe};
        queues_[i] = std::make_unique<nic::SendQueue>(connection, shared, memory_, options_, random, tell);
        served_.push_back(queues_[i].get());
        ring += options_.blocks;
    }
    queue_pairs_ = make_private(queue_pairs);
    device.queue_pairs = queue_pairs_.get();
    device.per_peer = per_peer;
}

uint64_t NicQueuePairs::max_put_bytes(uint32_t pieces) const {
    return max_bytes_of_put(options_.blocks, options_.chunk_log2, options_.max_bytes, pieces);
}

// The counter is written by kernels. Either no other data depends on its value, or the kernels have ended.
uint64_t NicQueuePairs::counted(size_t queue, u64 Counts::* count) const {
    return allocator_.load_word(reinterpret_cast<const uint64_t*>(&(counts_.get()[queue].*count)));
}

bool NicQueuePairs::idle() const {
    for (size_t i = 0; i < queues_.size(); ++i) {
        if (queues_[i] && !queues_[i]->idle(counted(i, &Counts::rung))) return false;
    }
    return true;
}

std::vector<nic::Counters> NicQueuePairs::counters() const {
    std::vector<nic::Counters> by_peer(ranks_);
    for (size_t i = 0; i < queues_.size(); ++i) {
        if (!queues_[i]) continue;
        nic::Counters& sum = by_peer[static_cast<size_t>(queues_[i]->connection().peer)];
        sum += queues_[i]->counters();
        sum.doorbells += counted(i, &Counts::rings);
    }
    return by_peer;
}

std::vector<nic::Message> NicQueuePairs::trace() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return messages_;
}

}  // namespace deep_ep::host
