// A rank's software NICs: the queue pairs that fabric/ibgda.h posts to, and what carries them out. All that kernels and
// the NIC share is a Memory's: on a GPU host memory that the GPU has mapped, and so are the heaps then.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "fabric/ibgda.h"
#include "host/memory.h"
#include "host/network.h"
#include "nic/send_queue.h"

namespace deep_ep::host {

class SoftNic final : public Network {
  public:
    // Who carries requests out.
    enum class Server {
        kAgents,  // the executor, which runs all ranks' kernels too: each queue pair is an agent
        kThread,  // one thread for all queue pairs: kernels run on a GPU, or on several processes' executors
    };

    // `heaps`: every rank's heap of `heap_bytes` as the host of this process reaches it; `remote[r]`: r is reached
    // through here. `memory` outlives this.
    SoftNic(int rank, const std::vector<uint8_t*>& heaps, uint64_t heap_bytes, const std::vector<bool>& remote,
            const nic::Options& options, Memory& memory, Server server);
    ~SoftNic() override;
    SoftNic(const SoftNic&) = delete;
    SoftNic& operator=(const SoftNic&) = delete;

    fabric::Ibgda* ibgda() override { return device_.get(); }
    uint64_t most_put_bytes() const override;
    bool idle() const override;
    std::string refusal() const override;
    std::vector<nic::Counters> counters() const override;
    std::vector<nic::Message> trace() const override;

  private:
    // What kernels and the NIC share for one queue pair, apart from its ring. Who writes what has a line of its own.
    struct alignas(64) Meeting {
        wire::mlx5::Cqe cqe;
        alignas(64) wire::mlx5::DoorbellRecord record;
        alignas(64) u64 doorbell;
        alignas(64) u64 returned;
    };

    // Memory in which the executor checks the scope of its kernels' accesses.
    struct SharedMemory {
        SharedMemory(const void* memory, size_t bytes);
        ~SharedMemory();
        const void* const memory;
    };
    struct Agent {
        explicit Agent(int number) : id(number) {}
        ~Agent();
        const int id;
    };

    // What kernels alone use, filled in once.
    template <class T>
    std::shared_ptr<T> make_private(const std::vector<T>& values) {
        const size_t bytes = values.size() * sizeof(T);
        auto made = std::static_pointer_cast<T>(allocator_.make_private(bytes));
        allocator_.write(made.get(), values.data(), bytes);
        return made;
    }
    template <class T>
    std::shared_ptr<T> make_shared(size_t count) {
        return std::static_pointer_cast<T>(allocator_.make_shared(count * sizeof(T)));
    }

    void make_keys(int rank, const std::vector<uint8_t*>& heaps, uint64_t heap_bytes, fabric::Ibgda& device);
    void make_queues(int rank, const std::vector<bool>& remote, Server server, fabric::Ibgda& device);
    uint64_t counted(size_t queue, u64 fabric::QueuePair::* counter) const;
    void serve(nic::SendQueue& queue);
    void serve_all();

    const nic::Options options_;
    const u32 ranks_;
    Memory& allocator_;
    nic::MemoryTable memory_;
    // The kernels' own.
    std::shared_ptr<u64> heap_addresses_;
    std::shared_ptr<u32> keys_;  // [ranks, chunks, nics]
    std::shared_ptr<fabric::QueuePair> queue_pairs_;
    std::shared_ptr<fabric::Ibgda> device_;
    // Shared with the kernels.
    std::shared_ptr<Meeting> meetings_;
    std::unique_ptr<SharedMemory> checked_;
    std::shared_ptr<wire::mlx5::Block> rings_;
    std::vector<std::unique_ptr<nic::SendQueue>> queues_;  // by queue pair; null for those that are not used
    mutable std::mutex mutex_;                             // of what follows
    std::vector<nic::Message> messages_;
    std::string refusal_;
    std::atomic<bool> stopping_{false};
    std::minstd_rand random_;  // the thread's
    std::vector<std::unique_ptr<Agent>> agents_;
    std::thread thread_;
};

}  // namespace deep_ep::host
