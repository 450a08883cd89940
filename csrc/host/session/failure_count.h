// The number of failures that the kernels of one rank's Buffers have claimed. Kernels of another Buffer that were
// queued behind a failed one may consume its results, so each tests this count at its entry (P15).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "host/heap/memory.h"
#include "wire/types.h"

namespace deep_ep::host {

class FailureCount {
  public:
    // A Buffer as seen by the others of its rank.
    class Member {
      public:
        virtual ~Member() = default;
        // Whether it has failed and its caller has not been notified.
        virtual bool untold() const = 0;
        // If its kernels have been told to leave: a function that waits for them, for a limited time, and returns
        // whether they have left. Otherwise null. The Buffer itself may be destroyed meanwhile.
        virtual std::function<bool(uint64_t nanoseconds)> leaving() const = 0;
    };

    // Returns the count that all Buffers of a rank share. `rank_key` identifies the rank within this process.
    static std::shared_ptr<FailureCount> of(uint64_t rank_key, Memory& memory);

    u64* address() const { return count_.get(); }
    void join(Member& member);
    // The kernels of the member have left. The others need no notice of a member that has not failed or whose caller
    // knows of the failure: they would wait for their own kernels (Engine's _leave_behind).
    void leave(Member& member);
    // A caller has been notified of a failure, or a Buffer with an unreported one no longer exists: the others may
    // leave the failure behind.
    void note_told();
    uint64_t told() const;
    // Returns the number of failures. Returns nothing if kernels that have been told to leave have not done so in time,
    // since each of them may count another failure, or if some caller has not been notified yet, since the results of
    // that Buffer may still be used.
    std::optional<uint64_t> settled(Memory& memory, uint64_t nanoseconds);
    // The latest result of settled(): the number of failures that no Buffer needs to consider any more.
    uint64_t left_behind() const;

  private:
    explicit FailureCount(std::shared_ptr<u64> count) : count_(std::move(count)) {}

    const std::shared_ptr<u64> count_;
    mutable std::mutex mutex_;
    std::vector<Member*> members_;
    uint64_t told_ = 0;
    uint64_t left_behind_ = 0;
};

}  // namespace deep_ep::host
