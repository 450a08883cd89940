// Masks ranks that this rank's kernels wait for in vain, so that the others go on without them (P17).
//
// Kernels say for whom they wait and for how long (wire/masked_ranks.h). A rank that has been waited for in vain is
// masked, unless it has an excuse: it compiles, or says that it waits itself, for another one. Then it is that one
// which is to be masked, by those that wait for it. A rank whose process has ended is masked at once.
//
// A rank to be masked is told first, by its abort word: it then finds the word before what it has read from others'
// memory counts (Operation::look_last). Only then are the others told, and their kernels go on without it.
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

// What it watches over.
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

    // Any thread: masks a rank that the caller wants to do without. False: this rank has failed, and masks none.
    bool mask(int rank);
    // With what others have told by now.
    wire::RankMask masked();
    void watch(Lifelines lifelines);

  protected:
    // `memory`: for this alone, so that what kernels are being launched or waited for with does not stand in the way.
    Warden(WardenPost post, std::unique_ptr<Memory> memory, const MakeControl& make_control);

    // Neither throws: what is not done here ends by kernels' timeouts. Looks only: whether there is anything to do.
    bool due() const noexcept;
    void serve() noexcept;

  private:
    // What is known of another rank, or of this one.
    struct Known {
        uint64_t seen = 0;     // what kernels here have told of it
        uint64_t accused = 0;  // what they had told when it had no excuse
        uint64_t waiting = 0;  // what it has told of its own waits
        int silent = 0;        // for how many steps it has told nothing new
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
    mutable std::mutex mutex_;  // of what follows
    std::vector<Known> known_;  // by rank
    uint64_t longest_ = 0;      // the longest of the waits that kernels here have told of
    wire::RankMask mine_{}, masked_{};
    uint64_t changes_ = 0;  // of `masked_`
    uint64_t mail_;         // read
};

// A thread of the host, which looks every few milliseconds.
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
