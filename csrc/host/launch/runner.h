// A host thread that runs jobs one after the other. On a CPU, kernels run only while some thread waits for them, and
// this one waits while the caller continues. It is independent of Python, so a caller that holds the GIL for long does
// not delay kernels.
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
    // A job that has been given to the thread. Any thread may call its functions.
    class Run {
      public:
        bool done() const;
        // Waits for at most `nanoseconds`. Returns whether the job is done.
        bool wait(uint64_t nanoseconds) const;
        // Returns the result of a job that is done, or rethrows its exception.
        bool result() const;
        bool failed() const;
        // The caller no longer waits for the job: a wait in it that checks Runner::cancelled() ends.
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

    // The thread is started with the first job.
    Runner() = default;
    // Does not wait for jobs: the thread finishes those that it has been given, and ends.
    ~Runner();
    Runner(const Runner&) = delete;
    Runner& operator=(const Runner&) = delete;

    std::shared_ptr<Run> start(std::function<bool()> job);
    // Waits for at most `nanoseconds`. Returns whether the thread has nothing to do.
    bool rest(uint64_t nanoseconds) const;
    // Whether the calling thread is running a job that has been cancelled.
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
