// How many failures the kernels of one rank's Buffers have claimed. Kernels of another Buffer that were queued behind a
// failure may work on what the failed one has left, so each tests this count at its entry (P15).
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
    // A Buffer, as the others of its rank see it.
    class Member {
      public:
        virtual ~Member() = default;
        // It has failed, and its caller has not been told.
        virtual bool untold() const = 0;
        // Where its kernels have been told to leave: waits so long for them; -> whether they have. Else nothing. The
        // Buffer itself may go meanwhile.
        virtual std::function<bool(uint64_t nanoseconds)> leaving() const = 0;
    };

    // The one that all Buffers of a rank share: `rank_key` is the same for them, and no other rank's in this process.
    static std::shared_ptr<FailureCount> of(uint64_t rank_key, Memory& memory);

    u64* address() const { return count_.get(); }
    void join(Member& member);
    // Its kernels have left. Of one that has not failed, or whose caller knows, the others need not take note: they
    // would wait for their own kernels (Engine's _leave_behind).
    void leave(Member& member);
    // A caller has been told of a failure, or a Buffer is gone that had one to tell: the others may leave it behind.
    void note_told();
    uint64_t told() const;
    // How many failures there are. Nothing where kernels that have been told to leave have not left after so long: each
    // may count one more; or where some caller does not know yet: what that Buffer has left may still be used.
    std::optional<uint64_t> settled(Memory& memory, uint64_t nanoseconds);
    // What settled() has last returned: failures that no Buffer need heed any more.
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
