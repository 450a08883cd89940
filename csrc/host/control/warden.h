// Masks ranks for which this rank's kernels wait until they time out, so that the others continue without them (P17).
//
// Kernels report for which ranks they wait and for how long (wire/masked_ranks.h). A rank whose wait has timed out is
// masked, unless it has an excuse: it is compiling, or reports that it is itself waiting for another one. In the latter
// case that other rank must be masked by the ranks that wait for it. A rank whose process has ended is masked at once.
//
// A rank to be masked is notified first, through its abort word: it then finds the word before the data it has read
// from others' memory counts (Operation::look_last). Only then are the others notified, and their kernels continue
// without it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "host/control/control_plane.h"
#include "host/control/progress.h"
#include "host/heap/memory.h"

namespace deep_ep::host {

// The rank and generation that a Warden serves.
struct WardenPost {
    int rank;
    int ranks;
    uint32_t generation;
    wire::RankMask left_out;  // in this generation
    uint64_t* suspects;       // Context::suspects
    Progress progress;
    Lifelines lifelines;
};

class Warden {
  public:
    virtual ~Warden() = default;
    Warden(const Warden&) = delete;
    Warden& operator=(const Warden&) = delete;

    // Masks a rank at the caller's request; may be called by any thread. Returns false if this rank has failed and
    // therefore masks none.
    bool mask(int rank);
    // Includes the masks that others have reported by now.
    wire::RankMask masked();
    void watch(Lifelines lifelines);

  protected:
    // `memory`: exclusive to this object, so that launches of kernels and waits for them do not delay it.
    Warden(WardenPost post, std::unique_ptr<Memory> memory, const MakeControl& make_control);

    // due() is a read-only check whether there is anything to do. Neither function throws: if work here fails, the
    // timeouts of kernels take effect.
    bool due() const noexcept;
    void serve() noexcept;

  private:
    // The state known about another rank, or about this one.
    struct Known {
        uint64_t seen = 0;     // the latest report of kernels here about it
        uint64_t accused = 0;  // that report when it had no excuse
        uint64_t waiting = 0;  // its own report about its waits
        int silent = 0;        // the number of steps without a new report
    };

    uint64_t told_of(int rank) const;
    bool counts(int rank) const;
    bool broken() const;
    bool lost(int rank) const;
    void listen();
    bool waits(int rank) const;
    int64_t sent(int rank) const;
    int64_t needed(int rank) const;
    int waiters_for(int rank) const;
    bool excused(int rank) const;
    bool guilty(int rank);
    void judge();
    void read_mail();
    void add(const wire::RankMask& more);
    void publish(const wire::RankMask& more);

    const WardenPost post_;
    const std::unique_ptr<Memory> memory_;
    const std::unique_ptr<ControlPlane> control_;
    mutable std::mutex mutex_;  // guards the members below
    std::vector<Known> known_;  // by rank
    uint64_t longest_ = 0;      // the longest wait that kernels here have reported
    wire::RankMask mine_{}, masked_{};
    uint64_t changes_ = 0;  // the number of changes of `masked_`
    uint64_t mail_;         // the value of the mail word at the last read
};

// A host thread that polls every few milliseconds.
class WardenThread final : public Warden {
  public:
    WardenThread(WardenPost post, std::unique_ptr<Memory> memory, const MakeControl& make_control);
    ~WardenThread() override;

  private:
    std::atomic<bool> stopping_{false};
    std::thread thread_;  // last: it uses the others
};

using MakeWarden = std::function<std::unique_ptr<Warden>(WardenPost post)>;

}  // namespace deep_ep::host
