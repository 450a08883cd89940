// A rank's software NICs as one thread of the host. It reaches the heaps of other processes through shared memory, and
// what a GPU's kernels post through memory that the GPU has mapped.
//
// Where kernels run on the executor, the thread that drives them serves the NICs too, in turns with the kernels: it has
// what they send in its cache, and the cores are not switched between the two. The NICs' own thread sleeps until such a
// thread leaves, and then carries out what that one has not. (Looking every millisecond, the threads of 8 ranks made a
// dispatch on 2 cores take 1.3 to 2 times as long.)
#pragma once

#include <atomic>
#include <string>
#include <thread>

#include "cpu/executor/futex.h"
#include "host/network/ibgda/soft_nic.h"

namespace deep_ep::host {

class NicThread final : public SoftNic {
  public:
    explicit NicThread(const NetworkPlace& place);
    ~NicThread() override;

    std::string refusal() const override;

  private:
    void run();
    void run_when_left_alone();
    // Carries out what has been posted. False where there was nothing to do, or another thread is at it.
    bool serve();
    // False where all that was posted has been carried out.
    bool is_left();

    const bool kernels_on_cpu_;
    int helper_ = -1;           // of the executor
    cpu::Gate left_alone_;      // opened where the executor's thread leaves something to do
    std::mutex serving_;        // queue pairs are one thread's at a time
    bool refused_ = false;      // guarded by it
    mutable std::mutex mutex_;  // of the refusal
    std::string refusal_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace deep_ep::host
