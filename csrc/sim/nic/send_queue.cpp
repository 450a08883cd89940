#include "sim/nic/send_queue.h"

#include <algorithm>
#include <cstring>

#include "observe/timeline.h"
#include "sim/nic/place.h"

namespace deep_ep::nic {

namespace mlx5 = wire::mlx5;

SendQueue::SendQueue(const Connection& connection, const SharedQueue& shared, const MemoryTable& memory,
                     const Options& options, Random random, Tell tell)
    : connection_(connection),
      shared_(shared),
      memory_(memory),
      options_(options),
      random_(std::move(random)),
      tell_(std::move(tell)) {
    observe::begin(accessor());
    observe::begin(port());
}

SendQueue::~SendQueue() {
    observe::end(accessor());
    observe::end(port());
}

void SendQueue::violate(u64 index, const std::string& wrong) const {
    throw Violation("rank " + std::to_string(connection_.rank) + ", queue pair " + std::to_string(connection_.number) +
                    " to rank " + std::to_string(connection_.peer) + ", request " + std::to_string(index) + ": " +
                    wrong);
}

// Read-only check.
bool SendQueue::rung() const { return __atomic_load_n(shared_.doorbell, __ATOMIC_RELAXED) != doorbell_; }

bool SendQueue::has_work() const {
    return !stopped_.load(std::memory_order_relaxed) && (!under_way_.empty() || taken_ != known_ || rung());
}

void SendQueue::answer_doorbell() {
    // A separate accessor: the NIC may serve this doorbell with a newer record, so only the record orders its reads.
    doorbell_ = observe::load_register(port(), shared_.doorbell);
    // The record is read after the doorbell has arrived, so it is never older than the doorbell. (ThreadSanitizer does
    // not model fences; for it, the record alone publishes what kernels have written.)
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    // Pairs with the kernel's release of the record: the WQEBBs that it covers, and the data that they send, are
    // visible.
    const u32 counter = mlx5::big(observe::load_acquire_once(accessor(), &shared_.record->send, port()));
    if (mlx5::doorbell_queue(doorbell_) != connection_.number) {
        violate(known_, "the doorbell is for queue pair " + std::to_string(mlx5::doorbell_queue(doorbell_)));
    }
    if (counter > 0xffff) violate(known_, "the doorbell record is " + std::to_string(counter) + ", more than 16 bits");
    // A record that is newer than the doorbell is legal; an older one is not.
    const u32 ahead = (counter - mlx5::doorbell_counter(doorbell_)) & 0xffff;
    if (ahead >= mlx5::kMaxBlocks)
        violate(known_, "the doorbell is ahead of its record: the record was written too late");
    const u64 now = known_ + ((counter - known_) & 0xffff);
    const u64 done = done_.load(std::memory_order_relaxed);
    if (now - done > options_.blocks) {
        violate(now,
                "overrun: " + std::to_string(now - done) + " requests in a ring of " + std::to_string(options_.blocks));
    }
    known_ = now;
}

void SendQueue::step() {
    if (rung()) answer_doorbell();
    if (broken()) return;
    const bool can_take = taken_ != known_ && under_way_.size() < options_.in_flight;
    if (can_take && (under_way_.empty() || random_(2) == 0)) return take();
    if (under_way_.empty()) return;
    // Requests execute in order; with `relaxed`, any write before the first atomic may be next.
    size_t candidates = 1;
    while (options_.relaxed && candidates < under_way_.size() &&
           under_way_[candidates - 1].request.opcode == mlx5::kRdmaWrite &&
           under_way_[candidates].request.opcode == mlx5::kRdmaWrite) {
        ++candidates;
    }
    place(under_way_[random_(static_cast<u32>(candidates))]);
    if (options_.atomics_pass && random_(2) == 0) {
        const auto atomic = std::find_if(under_way_.begin(), under_way_.end(), [](const UnderWay& one) {
            return !one.executed && one.request.opcode == mlx5::kFetchAdd;
        });
        if (atomic != under_way_.end()) place(*atomic);
    }
    complete();
}

void SendQueue::take() {
    mlx5::Block& block = shared_.ring[taken_ & (options_.blocks - 1)];
    UnderWay one;
    one.begun = observe::timeline::now();
    std::string wrong;
    observe::read(accessor(), &block, sizeof(block));
    if (!decode(block, taken_, connection_, memory_, one.request, wrong)) violate(taken_, wrong);
    // A ConnectX never writes here. The poison reveals a WQEBB that is read again before it has been rewritten.
    std::memset(static_cast<void*>(&block), kPoison, sizeof(block));
    ++taken_;
    for (u32 at = 0; one.request.source != nullptr && at < one.request.bytes; at += options_.mtu) {
        one.cuts.push_back(at);
    }
    const bool atomic = one.request.opcode == mlx5::kFetchAdd;
    (atomic ? atomics_ : writes_).fetch_add(1, std::memory_order_relaxed);
    if (!atomic) bytes_.fetch_add(one.request.bytes, std::memory_order_relaxed);
    if (tell_) {
        tell_({0, connection_.rank, connection_.peer, connection_.number, one.request.opcode, one.request.bytes});
    }
    under_way_.push_back(std::move(one));
}

void SendQueue::place_cut(UnderWay& one, size_t which) {
    const u32 at = one.cuts[which];
    one.cuts.erase(one.cuts.begin() + static_cast<i64>(which));
    const u32 bytes = std::min(options_.mtu, one.request.bytes - at);
    observe::read(accessor(), one.request.source + at, bytes);
    observe::write(accessor(), one.request.target + at, bytes);
    nic::place(one.request.target + at, one.request.source + at, bytes);
    connection_.closing.placed();
}

void SendQueue::place(UnderWay& one) {
    if (!one.cuts.empty()) {
        place_cut(one, options_.relaxed ? random_(static_cast<u32>(one.cuts.size())) : 0);
        if (one.cuts.empty()) record(one, one.request.bytes);
        return;
    }
    if (one.executed || one.request.source != nullptr) return;
    one.executed = true;
    auto* word = reinterpret_cast<u64*>(one.request.target);
    if (one.request.opcode == mlx5::kFetchAdd) {
        // The receiver acquires the word and then reads what this queue pair has placed before. The word orders nothing
        // that other queue pairs place.
        const u64 before = observe::add_release(accessor(), word, one.request.add);
        *one.request.returned = before;
        record(one, before + one.request.add);
    } else {
        observe::store_release(accessor(), word, one.request.inlined);
        record(one, one.request.inlined);
    }
}

void SendQueue::record(const UnderWay& one, u64 value) const {
    using observe::timeline::Kind;
    if (one.begun == 0) return;
    const Kind kind = one.request.source != nullptr ? Kind::kPut : Kind::kSignal;
    observe::timeline::add({kind, connection_.rank, connection_.peer, connection_.number, 0, 0, one.begun,
                            observe::timeline::now(), value, one.request.target,
                            kind == Kind::kPut ? "put" : "signal"});
}

void SendQueue::complete() {
    while (!under_way_.empty()) {
        const UnderWay& first = under_way_.front();
        const bool done = first.cuts.empty() && (first.executed || first.request.source != nullptr);
        if (!done) return;
        done_.store(first.request.index + 1, std::memory_order_release);
        if (first.request.completion) report(first.request.index, first.request.opcode, mlx5::kRequestDone, 0);
        under_way_.pop_front();
    }
}

bool SendQueue::broken() {
    if (connection_.closing.closed()) {  // the peer does not answer
        fail(mlx5::kRetriesExceeded);
        return true;
    }
    const bool ours = options_.fault_rank == connection_.rank &&
                      (options_.fault_peer == -1 || options_.fault_peer == connection_.peer);
    if (!ours || done_.load(std::memory_order_relaxed) < options_.fault_after) return false;
    if (under_way_.empty() && taken_ == known_) return false;
    if (options_.fault_syndrome != 0) {
        fail(options_.fault_syndrome);
    } else {
        stopped_.store(true);
    }
    return true;
}

// Reports the oldest request in progress. A ConnectX then reports all later ones as flushed in the same CQE: the kind
// stays, but the syndrome is overwritten unless it is read in time.
void SendQueue::fail(u32 syndrome) {
    const u64 index = under_way_.empty() ? taken_ : under_way_.front().request.index;
    const u32 opcode = under_way_.empty() ? u32{mlx5::kRdmaWrite} : under_way_.front().request.opcode;
    report(index, opcode, mlx5::kRequestError, syndrome);
    if (options_.fault_flushes && known_ > index + 1) report(known_ - 1, opcode, mlx5::kRequestError, mlx5::kFlushed);
    stopped_.store(true);
}

void SendQueue::report(u64 index, u32 opcode, mlx5::CqeKind kind, u32 syndrome) {
    mlx5::Cqe& cqe = *shared_.cqe;
    cqe.vendor = 0;
    cqe.syndrome = static_cast<u8>(syndrome);
    cqe.opcode_queue = mlx5::big(opcode << 24 | connection_.number);
    // The kernel acquires this word; then it may overwrite the WQEBBs of the requests and the data that they sent.
    observe::store_release(accessor(), &cqe.tail, mlx5::cqe_tail(index, kind));
}

Counters SendQueue::counters() const {
    return {writes_.load(std::memory_order_relaxed), atomics_.load(std::memory_order_relaxed),
            bytes_.load(std::memory_order_relaxed), 0};
}

}  // namespace deep_ep::nic
