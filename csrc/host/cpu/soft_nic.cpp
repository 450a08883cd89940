#include "host/cpu/soft_nic.h"

#include <chrono>
#include <cstring>

#include "cpu/executor/executor.h"
#include "device/device.h"

namespace deep_ep::host {
namespace {

namespace mlx5 = wire::mlx5;

// Addresses as NICs know them have nothing to do with this process's: a kernel that mixes them up is found out.
u64 heap_address(int rank) { return (static_cast<u64>(rank) + 1) << 44; }
u64 returned_address(u32 queue) { return 1ull << 60 | static_cast<u64>(queue) << 12; }
// Odd: of heaps, the same on every rank; even: of a queue pair's word.
u32 heap_key(u64 number) { return static_cast<u32>(number << 1 | 1); }
u32 returned_key(u32 queue) { return queue << 1; }

constexpr u64 kMostKeys = 1u << 24;
constexpr auto kNap = std::chrono::microseconds(20);
constexpr int kIdleLooks = 200;  // before a thread that serves naps

}  // namespace

SoftNic::SharedMemory::SharedMemory(const void* given, size_t bytes) : memory(given) {
    cpu::Executor::get().share_memory(memory, bytes, -1);
}
SoftNic::SharedMemory::~SharedMemory() { cpu::Executor::get().unshare_memory(memory); }
SoftNic::Agent::~Agent() { cpu::Executor::get().remove_agent(id); }

SoftNic::SoftNic(int rank, const std::vector<uint8_t*>& heaps, uint64_t heap_bytes, const std::vector<bool>& remote,
                 const nic::Options& options, bool in_process)
    : options_(options), ranks_(static_cast<u32>(heaps.size())) {
    make_keys(rank, heaps, heap_bytes);
    random_.seed(static_cast<u32>(rank) + 1);
    make_queues(rank, remote, in_process);
    if (in_process) {
        for (auto& queue : queues_) {
            if (!queue) continue;
            nic::SendQueue& served = *queue;
            const std::string name = "queue pair to rank " + std::to_string(served.connection().peer);
            const int agent = cpu::Executor::get().add_agent(rank, name, [this, &served] { serve(served); });
            agents_.push_back(std::make_unique<Agent>(agent));
        }
    } else {
        thread_ = std::thread([this] { serve_all(); });
    }
}

SoftNic::~SoftNic() {
    stopping_.store(true);
    if (thread_.joinable()) thread_.join();
}

void SoftNic::make_keys(int rank, const std::vector<uint8_t*>& heaps, uint64_t heap_bytes) {
    const u64 chunk = 1ull << options_.chunk_log2;
    const u32 chunks = static_cast<u32>((heap_bytes + chunk - 1) / chunk);
    const u64 keys = u64{ranks_} * chunks * options_.nics;
    if (keys > kMostKeys) {
        throw std::invalid_argument("chunk_log2=" + std::to_string(options_.chunk_log2) + ": heaps of " +
                                    std::to_string(heap_bytes) + " bytes would need " + std::to_string(keys) +
                                    " memory keys, expected at most " + std::to_string(kMostKeys));
    }
    for (u32 r = 0; r < ranks_; ++r) {
        heap_addresses_.push_back(heap_address(static_cast<int>(r)));
        for (u32 c = 0; c < chunks; ++c) {
            for (u32 n = 0; n < options_.nics; ++n) {
                const u32 key = heap_key((u64{r} * chunks + c) * options_.nics + n);
                const u64 offset = c * chunk;
                memory_.add(key, {static_cast<int>(r), heap_addresses_[r] + offset,
                                  std::min(chunk, heap_bytes - offset), heaps[r] + offset});
                keys_.push_back(mlx5::big(key));
            }
        }
    }
    device_.nics = options_.nics;
    device_.chunks = chunks;
    device_.chunk_log2 = options_.chunk_log2;
    device_.most_bytes = options_.most_bytes;
    device_.heap = heap_addresses_[static_cast<size_t>(rank)];
    device_.heaps = heap_addresses_.data();
    // One key serves a chunk from here and from afar.
    device_.keys = keys_.data() + static_cast<size_t>(rank) * chunks * options_.nics;
    device_.remote_keys = keys_.data();
}

void SoftNic::make_queues(int rank, const std::vector<bool>& remote, bool in_process) {
    const u32 per_peer = options_.queues_per_peer, count = ranks_ * per_peer;
    queue_pairs_.resize(count);
    queues_.resize(count);
    meetings_ = std::make_unique<Meeting[]>(count);
    shared_ = std::make_unique<SharedMemory>(meetings_.get(), count * sizeof(Meeting));
    u32 used = 0;
    for (const bool far : remote) used += far ? per_peer : 0;
    rings_ = std::make_unique<mlx5::Block[]>(static_cast<size_t>(used) * options_.blocks);
    std::memset(static_cast<void*>(rings_.get()), nic::kPoison,
                static_cast<size_t>(used) * options_.blocks * mlx5::kBlockBytes);
    nic::SendQueue::Random random = [this](u32 bound) { return static_cast<u32>(random_() % bound); };
    if (in_process) {  // a world's, so that a seed says all
        random = [](u32 bound) { return static_cast<u32>(cpu::Executor::get().random() % bound); };
    }
    nic::SendQueue::Tell tell;
    if (options_.traced) {
        tell = [this](nic::Message message) {
            message.time_ns = cpu::Executor::get().now_ns();
            const std::lock_guard<std::mutex> guard(mutex_);
            messages_.push_back(message);
        };
    }
    mlx5::Block* ring = rings_.get();
    for (u32 i = 0; i < count; ++i) {
        const u32 peer = i / per_peer;
        fabric::QueuePair& qp = queue_pairs_[i];
        qp.peer = peer;
        if (!remote[peer]) continue;
        Meeting& meeting = meetings_[i];
        std::memset(static_cast<void*>(&meeting.cqe), 0xff, sizeof(meeting.cqe));
        // A number says nothing of where the queue pair is in the table.
        const nic::Connection connection{rank, static_cast<int>(peer), 0x40 + 7 * i};
        memory_.add(returned_key(i),
                    {rank, returned_address(i), sizeof(u64), reinterpret_cast<u8*>(&meeting.returned)});
        qp.ring = ring;
        qp.record = &meeting.record.send;
        qp.doorbell = &meeting.doorbell;
        qp.cqe = &meeting.cqe;
        qp.returned = returned_address(i);
        qp.returned_key = mlx5::big(returned_key(i));
        qp.number = connection.number;
        qp.blocks = options_.blocks;
        qp.nic = i % options_.nics;
        qp.remote_nic = static_cast<u32>(rank) % options_.nics;
        const nic::SharedQueue shared{ring, &meeting.record, &meeting.doorbell, &meeting.cqe};
        queues_[i] = std::make_unique<nic::SendQueue>(connection, shared, memory_, options_, random, tell);
        ring += options_.blocks;
    }
    device_.queue_pairs = queue_pairs_.data();
    device_.per_peer = per_peer;
}

void SoftNic::serve(nic::SendQueue& queue) {
    cpu::Executor& executor = cpu::Executor::get();
    for (;;) {
        cpu::wait_until([&] { return queue.has_work(); }, "NIC: a doorbell");
        for (u64 delay = options_.most_delay != 0 ? executor.random() % options_.most_delay : 0; delay != 0; --delay) {
            cpu::yield();
        }
        queue.step();
    }
}

void SoftNic::serve_all() {
    int idle_looks = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
        bool worked = false;
        try {
            for (auto& queue : queues_) {
                if (!queue || !queue->has_work()) continue;
                queue->step();
                worked = true;
            }
        } catch (const std::exception& error) {
            {
                const std::lock_guard<std::mutex> guard(mutex_);
                refusal_ = error.what();
            }
            // Kernels hear of it as of any error, and end; then refusal() says what it was.
            for (auto& queue : queues_) {
                if (queue) queue->fail(mlx5::kLocalOperation);
            }
            return;
        }
        idle_looks = worked ? 0 : idle_looks + 1;
        if (idle_looks > kIdleLooks) std::this_thread::sleep_for(kNap);
    }
}

// Its requests must fit into the ring at once: of each piece one for every `most_bytes` and two for every chunk, whose
// ends lie elsewhere here and there, and three for what is left over; and the atomic.
uint64_t SoftNic::most_put_bytes() const {
    const u64 chunk = u64{1} << options_.chunk_log2, requests = options_.blocks - 1 - 3 * fabric::kMaxPieces;
    const u64 most = std::min(options_.most_bytes, chunk);
    return requests * (most * (chunk / wire::kPieceBytes) / (chunk + 2 * most)) * wire::kPieceBytes;
}

bool SoftNic::idle() const {
    for (size_t i = 0; i < queues_.size(); ++i) {
        // Written by kernels that have ended.
        if (queues_[i] && !queues_[i]->idle(__atomic_load_n(&queue_pairs_[i].rung, __ATOMIC_RELAXED))) return false;
    }
    return true;
}

std::string SoftNic::refusal() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return refusal_;
}

std::vector<nic::Counters> SoftNic::counters() const {
    std::vector<nic::Counters> by_peer(ranks_);
    for (size_t i = 0; i < queues_.size(); ++i) {
        if (!queues_[i]) continue;
        const nic::Counters one = queues_[i]->counters();
        nic::Counters& sum = by_peer[queue_pairs_[i].peer];
        sum.writes += one.writes;
        sum.atomics += one.atomics;
        sum.bytes += one.bytes;
        sum.doorbells += __atomic_load_n(&queue_pairs_[i].rings, __ATOMIC_RELAXED);
    }
    return by_peer;
}

std::vector<nic::Message> SoftNic::trace() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return messages_;
}

}  // namespace deep_ep::host
