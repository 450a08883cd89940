// One PE, from the first initialization to the last finalization.
#pragma once

#include <atomic>
#include <memory>
#include <shared_mutex>
#include <string>

#include "gpu.h"
#include "heap.h"
#include "meeting.h"
#include "modules.h"
#include "nics.h"
#include "posting.h"
#include "states.h"

namespace nvshmem_double {

// Space before the heaps' allocations suffices for this many PEs.
constexpr int kMaxPes = 128;

// Calls throw Failure.
class Pe {
  public:
    // Bootstrapped: all PEs with this id have met.
    Pe(const std::string& id, int pe, int pes);
    // Also initializes the device, unless that has been done. Collective.
    void initialise(Gpu::Context context);
    // Collective. An exception is for the caller to report; all resources are released in either case.
    void finalise();

    int number() const { return pe_; }
    int pes() const { return pes_; }
    // Acquire: pairs with the store at the end of initialise(); threads that post call this without the calls' lock.
    bool initialised() const { return ready_.load(std::memory_order_acquire); }

    // Collective; null if there is no room.
    void* allocate(const std::string& call, uint64_t alignment, uint64_t bytes, uint8_t filled_with);
    void free(void* address);
    void* near(const void* address, int pe) const;
    void barrier();
    // To each other PE, including near ones, over the queue pairs that NVSHMEM's own kernels use.
    void post_foreign(int count);

    void add_module(void* module);
    void remove_module(void* module) { modules_.remove(module); }
    // Collective. Returns handles, allocated by malloc.
    int* create_queue_pairs(int count);

  private:
    struct Target;

    bool far(int pe) const { return heap_->near(pe) == nullptr; }
    void make_states();
    void copy_states();
    void grow();
    uint64_t reserved_word(int pe) const;
    uint64_t reserved_row(int pe) const;
    // One of NVSHMEM's own, used in turn.
    QueueRow row(int peer, int turn) const;
    Target target(const QueueRow& queue, int peer, uint64_t offset) const;
    void post_arrival(int peer);
    void post_pair(int peer, int turn);
    void await_arrivals();
    void quiet();

    const Settings settings_;
    const Golden golden_;
    const std::string folder_;
    const int pe_, pes_;
    Meeting meeting_;
    std::unique_ptr<Gpu> gpu_;
    std::unique_ptr<Heap> heap_;
    std::unique_ptr<Nics> nics_;
    std::unique_ptr<States> states_;
    Modules modules_;
    std::atomic<bool> ready_{false};  // with the device
    int chunks_ = 0;                  // with keys
    uint64_t barriers_ = 0;           // that this PE has reached
    // Held shared by posting threads, exclusively while nvshmemx_qp_create moves the table.
    mutable std::shared_mutex table_;
};

}  // namespace nvshmem_double
