// The NICs of a PE: csrc/sim/nic's queue pairs over memory as NVSHMEM allocates it, served by a thread. Rings, doorbell
// records, completions and the words for values that atomics return are in device memory; the doorbell register is in
// host memory. If a host thread rings the doorbells, it owns record and register, and kernels write a word that it
// polls.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gpu.h"
#include "heap.h"
#include "sim/nic/send_queue.h"
#include "states.h"

namespace nvshmem_double {

class Nics {
  public:
    Nics(const Settings& settings, Gpu& gpu, const Heap& heap, int pe, int pes);
    ~Nics();
    Nics(const Nics&) = delete;
    Nics& operator=(const Nics&) = delete;

    Parts make_queue(int peer, int nic);
    // Keys in host byte order, as NICs read them from requests.
    uint32_t key(int chunk, int nic) const;
    uint32_t remote_key(int chunk, int pe, int nic) const;
    // Differs from any address of this process.
    static uint64_t remote_heap(int pe) { return (static_cast<uint64_t>(pe) + 1) << 44; }
    void register_chunk(int chunk);
    // Throws Failure if a request was refused.
    void check() const;

  private:
    // Separate state of a queue pair with `cpu_doorbells`.
    struct Assisted {
        deep_ep::u64* word;  // kernels raise it
        deep_ep::wire::mlx5::DoorbellRecord record;
        deep_ep::u64 doorbell;
        deep_ep::u64 rung;
        uint32_t number;
    };
    struct Served {
        std::unique_ptr<deep_ep::nic::SendQueue> queue;
        Assisted* assisted;  // or null
        uint32_t delay;      // turns until the next step
    };

    void run();
    bool serve();
    bool step(Served& served);
    static void ring(Assisted& assisted);
    uint32_t draw(uint32_t bound);

    const Settings& settings_;
    Gpu& gpu_;
    const Heap& heap_;
    const int pe_, pes_;
    uint32_t made_ = 0;
    mutable std::mutex mutex_;  // guards everything below
    uint32_t random_;
    std::deque<deep_ep::nic::MemoryTable> memory_;  // by NIC
    std::deque<Assisted> assisted_;
    std::vector<Served> served_;
    std::string refusal_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace nvshmem_double
