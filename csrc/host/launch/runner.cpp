#include "host/launch/runner.h"

#include <chrono>
#include <thread>
#include <utility>

namespace deep_ep::host {

bool Runner::Run::done() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return done_;
}

bool Runner::Run::wait(uint64_t nanoseconds) const {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::nanoseconds(nanoseconds), [this] { return done_; });
}

bool Runner::Run::result() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    return result_;
}

bool Runner::Run::failed() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return failure_ != nullptr;
}

void Runner::Run::do_now() {
    bool result = false;
    std::exception_ptr failure;
    cancelled_here_ = &cancelled_;
    try {
        result = job_();
    } catch (...) {
        failure = std::current_exception();
    }
    cancelled_here_ = nullptr;
    const std::lock_guard<std::mutex> guard(mutex_);
    job_ = nullptr;
    result_ = result;
    failure_ = failure;
    done_ = true;
    changed_.notify_all();
}

Runner::~Runner() {
    // A forked child has a copy without the thread, in which mutexes that the thread held stay locked.
    if (getpid() != queue_->maker) return;
    const std::lock_guard<std::mutex> guard(queue_->mutex);
    queue_->ending = true;
    queue_->changed.notify_all();
}

std::shared_ptr<Runner::Run> Runner::start(std::function<bool()> job) {
    auto run = std::make_shared<Run>();
    run->job_ = std::move(job);
    const std::lock_guard<std::mutex> guard(queue_->mutex);
    if (!queue_->has_thread) {
        std::thread(serve, queue_).detach();  // if it throws, the next call tries again
        queue_->has_thread = true;
    }
    queue_->runs.push_back(run);
    queue_->changed.notify_all();
    return run;
}

bool Runner::rest(uint64_t nanoseconds) const {
    std::unique_lock<std::mutex> lock(queue_->mutex);
    return queue_->changed.wait_for(lock, std::chrono::nanoseconds(nanoseconds),
                                    [this] { return !queue_->working && queue_->runs.empty(); });
}

void Runner::serve(const std::shared_ptr<Queue>& queue) {
    for (;;) {
        std::shared_ptr<Run> next;
        {
            std::unique_lock<std::mutex> lock(queue->mutex);
            queue->changed.wait(lock, [&] { return queue->ending || !queue->runs.empty(); });
            if (queue->runs.empty()) return;
            next = std::move(queue->runs.front());
            queue->runs.pop_front();
            queue->working = true;
        }
        next->do_now();
        const std::lock_guard<std::mutex> guard(queue->mutex);
        queue->working = false;
        queue->changed.notify_all();
    }
}

}  // namespace deep_ep::host
