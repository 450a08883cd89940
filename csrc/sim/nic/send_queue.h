// One queue pair of the software NIC: takes requests from the send queue, executes them as a ConnectX may, and
// completes them. Its owner calls step(), from one thread or fiber at a time.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <stdexcept>
#include <vector>

#include "host/network/nic_options.h"
#include "observe/observer.h"
#include "sim/nic/request.h"

namespace deep_ep::nic {

// A request, a record or a doorbell that a ConnectX would refuse or execute wrongly: a bug in the code that wrote it.
class Violation : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Memory that kernels share with a queue pair.
struct SharedQueue {
    wire::mlx5::Block* ring;
    wire::mlx5::DoorbellRecord* record;
    u64* doorbell;
    wire::mlx5::Cqe* cqe;
};

class SendQueue {
  public:
    using Random = std::function<u32(u32 bound)>;
    using Tell = std::function<void(const Message&)>;

    // `random`: draws the choices of the network. `tell`: receives every request, or is empty.
    SendQueue(const Connection& connection, const SharedQueue& shared, const MemoryTable& memory,
              const Options& options, Random random, Tell tell);
    ~SendQueue();
    SendQueue(const SendQueue&) = delete;
    SendQueue& operator=(const SendQueue&) = delete;

    // Read-only check: a doorbell has arrived, or requests are in progress.
    bool has_work() const;
    // Takes a request, places part of one, or completes one. Throws Violation.
    void step();
    // Reports an error, and stops.
    void fail(u32 syndrome);
    // Whether all `rung` WQEBBs for which doorbells have rung are done; for other threads.
    bool idle(u64 rung) const { return done_.load(std::memory_order_acquire) >= rung || stopped_.load(); }

    const Connection& connection() const { return connection_; }
    Counters counters() const;

  private:
    struct UnderWay {
        Request request;
        std::vector<u32> cuts;  // parts of a write that have not been placed yet
        bool executed = false;  // for an atomic or an inline write
        u64 begun = 0;          // when it was taken, for a timeline that is being recorded
    };

    observe::Accessor accessor() const { return {observe::Kind::kNic, this, static_cast<u32>(connection_.rank)}; }
    // The doorbell register.
    observe::Accessor port() const {
        return {observe::Kind::kNic, shared_.doorbell, static_cast<u32>(connection_.rank)};
    }
    bool rung() const;
    void answer_doorbell();
    void take();
    void place(UnderWay& one);
    void place_cut(UnderWay& one, size_t which);
    void complete();
    void record(const UnderWay& one, u64 value) const;
    bool broken();
    void report(u64 index, u32 opcode, wire::mlx5::CqeKind kind, u32 syndrome);
    [[noreturn]] void violate(u64 index, const std::string& wrong) const;

    const Connection connection_;
    const SharedQueue shared_;
    const MemoryTable& memory_;
    const Options& options_;
    const Random random_;
    const Tell tell_;
    u64 doorbell_ = 0;  // the last one answered
    u64 known_ = 0;     // WQEBBs that the record has announced
    u64 taken_ = 0;
    std::deque<UnderWay> under_way_;
    // Read by other threads.
    std::atomic<u64> done_{0};
    std::atomic<bool> stopped_{false};  // after an error, or silent
    std::atomic<u64> writes_{0}, atomics_{0}, bytes_{0};
};

}  // namespace deep_ep::nic
