// A rank's software NICs: the queue pairs that fabric/ibgda.h posts to, and what carries them out. Where all ranks live
// in this process every queue pair is an agent of the executor; else one thread serves them all, and reaches the other
// ranks' heaps through shared memory.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "fabric/ibgda.h"
#include "host/network.h"
#include "nic/send_queue.h"

namespace deep_ep::host {

class SoftNic final : public Network {
  public:
    // `heaps`: every rank's heap of `heap_bytes` as mapped in this process; `remote[r]`: r is reached through here.
    SoftNic(int rank, const std::vector<uint8_t*>& heaps, uint64_t heap_bytes, const std::vector<bool>& remote,
            const nic::Options& options, bool in_process);
    ~SoftNic() override;
    SoftNic(const SoftNic&) = delete;
    SoftNic& operator=(const SoftNic&) = delete;

    fabric::Ibgda* ibgda() override { return &device_; }
    uint64_t most_put_bytes() const override;
    bool idle() const override;
    std::string refusal() const override;
    std::vector<nic::Counters> counters() const override;
    std::vector<nic::Message> trace() const override;

  private:
    // What kernels and the NIC share for one queue pair, apart from its ring.
    struct alignas(64) Meeting {
        wire::mlx5::Cqe cqe;
        alignas(64) wire::mlx5::DoorbellRecord record;
        alignas(64) u64 doorbell;
        alignas(64) u64 returned;
    };

    // Memory whose accesses the executor checks the scope of.
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

    void make_keys(int rank, const std::vector<uint8_t*>& heaps, uint64_t heap_bytes);
    void make_queues(int rank, const std::vector<bool>& remote, bool in_process);
    void serve(nic::SendQueue& queue);
    void serve_all();

    const nic::Options options_;
    const u32 ranks_;
    nic::MemoryTable memory_;
    std::vector<u64> heap_addresses_;
    std::vector<u32> keys_;  // [ranks, chunks, nics]
    std::vector<fabric::QueuePair> queue_pairs_;
    std::unique_ptr<Meeting[]> meetings_;
    std::unique_ptr<SharedMemory> shared_;
    std::unique_ptr<wire::mlx5::Block[]> rings_;
    fabric::Ibgda device_{};
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
