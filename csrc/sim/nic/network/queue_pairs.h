// A rank's software NICs: the queue pairs to which fabric/ibgda.h posts. Everything that kernels and the NIC share
// comes from a Memory; with a GPU it is host memory that the GPU has mapped, as the heaps are then too. Requests are
// executed by a thread (nic_thread.h) or by agents of the executor (nic_agents.h).
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "fabric/ibgda.h"
#include "host/heap/memory.h"
#include "host/network/network.h"
#include "sim/nic/send_queue.h"

namespace deep_ep::host {

class NicQueuePairs : public Network {
  public:
    NicQueuePairs(const NicQueuePairs&) = delete;
    NicQueuePairs& operator=(const NicQueuePairs&) = delete;

    void* state() override { return device_.get(); }
    uint64_t max_put_bytes(uint32_t pieces) const override;
    bool idle() const override;
    std::vector<nic::Counters> counters() const override;
    std::vector<nic::Message> trace() const override;

  protected:
    // `now_ns`: the clock for traces.
    NicQueuePairs(const NetworkPlace& place, nic::SendQueue::Random random, std::function<uint64_t()> now_ns);
    const nic::Options& options() const { return options_; }
    // The queues in use.
    const std::vector<nic::SendQueue*>& served() const { return served_; }

  private:
    // The data shared by kernels and the NIC for one queue pair, apart from its ring. Each field has its own cache
    // line, since kernels write some of them and the NIC the others.
    struct alignas(64) QueueMemory {
        wire::mlx5::Cqe cqe;
        alignas(64) wire::mlx5::DoorbellRecord record;
        alignas(64) u64 doorbell;
        alignas(64) u64 returned;
    };

    // The counters of one queue pair that only kernels use, in one cache line: a thread that posts uses nearly all of
    // it.
    struct alignas(64) Counts {
        u64 reserved;
        u64 filled;
        u64 rung;
        u64 completed;
        u64 rings;
        u32 ringing;
    };

    // Allocates memory that only kernels use, and fills it in once.
    template <class T>
    std::shared_ptr<T> make_private(const std::vector<T>& values) {
        const size_t bytes = values.size() * sizeof(T);
        auto made = std::static_pointer_cast<T>(allocator_.make_private(bytes));
        allocator_.write(made.get(), values.data(), bytes);
        return made;
    }

    void make_keys(const NetworkPlace& place, fabric::Ibgda& device);
    void make_queues(const NetworkPlace& place, const nic::SendQueue::Random& random, fabric::Ibgda& device);
    uint64_t counted(size_t queue, u64 Counts::* count) const;

    const nic::Options options_;
    const std::function<uint64_t()> now_ns_;
    const u32 ranks_;
    Memory& allocator_;
    nic::MemoryTable memory_;
    // Used by kernels alone.
    std::shared_ptr<u64> heap_addresses_;
    std::shared_ptr<u32> keys_;  // [ranks, chunks, nics]
    std::shared_ptr<Counts> counts_;
    std::shared_ptr<fabric::QueuePair> queue_pairs_;
    std::shared_ptr<fabric::Ibgda> device_;
    // Shared with the kernels.
    std::shared_ptr<QueueMemory> queue_memory_;
    std::shared_ptr<wire::mlx5::Block> rings_;
    std::vector<std::unique_ptr<nic::SendQueue>> queues_;  // by queue pair; null for those not in use
    std::vector<nic::SendQueue*> served_;
    mutable std::mutex mutex_;  // guards `messages_`
    std::vector<nic::Message> messages_;
};

}  // namespace deep_ep::host
