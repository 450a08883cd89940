// A rank's software NICs as one host thread. It reaches the heaps of other processes through shared memory, and the
// requests that a GPU's kernels post through memory that the GPU has mapped.
//
// Where kernels run on the executor, the thread that runs them also serves the NICs, alternating with the kernels:
// their data is in its cache, and the cores need no context switch. The NICs' own thread sleeps until such a thread
// leaves, and then executes what that one has not. (When it polled every millisecond instead, the threads of 8 ranks
// made a dispatch on 2 cores take 1.3 to 2 times as long.)
#pragma once

#include <atomic>
#include <string>
#include <thread>

#include "sim/executor/futex.h"
#include "sim/nic/network/queue_pairs.h"

namespace deep_ep::host {

class NicThread final : public NicQueuePairs {
  public:
    explicit NicThread(const NetworkPlace& place);
    ~NicThread() override;

    std::string refusal() const override;

  private:
    void run();
    void run_when_left_alone();
    // Executes posted requests. Returns false if there were none, or if another thread is serving.
    bool serve();
    // Returns false if all posted requests have been executed.
    bool is_left();

    const bool kernels_on_cpu_;
    int helper_ = -1;           // of the executor
    cpu::Gate left_alone_;      // opened when the executor's thread leaves requests behind
    std::mutex serving_;        // held by the thread that serves the queue pairs
    bool refused_ = false;      // guarded by `serving_`
    mutable std::mutex mutex_;  // guards `refusal_`
    std::string refusal_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace deep_ep::host
