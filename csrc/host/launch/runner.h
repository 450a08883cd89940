// A thread of the host that does jobs one after the other: on a CPU kernels run while some thread waits for them, and
// this one waits while the caller goes on. It needs nothing of the caller's language: a caller that holds Python's GIL
// for long holds up no kernels.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include <unistd.h>

namespace deep_ep::host {

class Runner {
  public:
    // A job that has been given to the thread. Any thread may ask.
    class Run {
      public:
        bool done() const;
        // -> whether it is done after so long.
        bool wait(uint64_t nanoseconds) const;
        // Of a job that is done: what it has returned; or throws what it has thrown.
        bool result() const;
        bool failed() const;
        // Its caller does not wait for it any more: a wait that looks at Runner::cancelled() ends there.
        void cancel() { cancelled_ = true; }

      private:
        friend class Runner;
        void do_now();

        std::function<bool()> job_;
        mutable std::mutex mutex_;
        mutable std::condition_variable changed_;
        bool done_ = false, result_ = false;
        std::exception_ptr failure_;
        std::atomic<bool> cancelled_{false};
    };
    struct Cancelled {};

    // The thread begins with the first job.
    Runner() = default;
    // Waits for no job: the thread does those that it has been given, and ends.
    ~Runner();
    Runner(const Runner&) = delete;
    Runner& operator=(const Runner&) = delete;

    std::shared_ptr<Run> start(std::function<bool()> job);
    // -> whether it has nothing to do, after so long.
    bool rest(uint64_t nanoseconds) const;
    // The calling thread does a job that is not waited for any more.
    static bool cancelled() { return cancelled_here_ != nullptr && *cancelled_here_; }

  private:
    struct Queue {
        const pid_t maker = getpid();
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<std::shared_ptr<Run>> runs;
        bool has_thread = false, working = false, ending = false;
    };
    static void serve(const std::shared_ptr<Queue>& queue);
    static inline thread_local const std::atomic<bool>* cancelled_here_ = nullptr;

    const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
};

}  // namespace deep_ep::host
