// How a Runtime handles failures of its own kernels, of its peers, and of its rank's other Buffers (P15).
#include <cstddef>
#include <stdexcept>

#include "host/heap/host_word.h"
#include "host/session/runtime.h"

namespace deep_ep::host {

wire::Failure Call::failure() const {
    const wire::Failure& record = outcome->failure;
    // Pairs with the claiming thread's release: the record is complete. It may be from another generation: that of a
    // captured call before a recovery.
    const u64 mark = observe::load_acquire(observe::host(rank), &record.mark);
    if (wire::mark_generation(mark) != generation) return {};
    observe::read(observe::host(rank), &record.phase, sizeof(record) - offsetof(wire::Failure, phase));
    wire::Failure failure = record;
    failure.mark = mark;
    return failure;
}

void Runtime::abort(uint32_t reason, int peer) {
    told_ = true;
    failures_->note_told();
    tell_failure(wire::abort_word(generation_, reason, static_cast<uint32_t>(options_.rank), peer));
}

// A masked rank notifies no other rank: the others continue without it, regardless of its failures (P17).
void Runtime::tell_failure(uint64_t word) {
    const uint64_t own = control_->failure(generation_);
    const bool masked = aborted() && wire::abort_reason(own) == wire::kMasked;
    if (!masked) control_->tell_failure(word, generation_);
}

bool Runtime::aborted() const { return wire::abort_generation(control_->failure(generation_)) >= generation_; }

void Runtime::abort_generation(uint32_t generation, uint32_t reason) {
    control_->tell_failure(wire::abort_word(generation, reason, static_cast<uint32_t>(options_.rank), -1), generation);
}

void Runtime::pass_abort_on() {
    // Some rank has stored the word here; otherwise this rank would not have given up.
    tell_failure(control_->failure(generation_));
}

// Returns null if kernels reach all ranks.
std::unique_ptr<Teller> Runtime::teller() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < options_.ranks; ++rank) {
        const bool mapped = options_.routes[static_cast<size_t>(rank)] == fabric::kMapped;
        if (present(rank) && !mapped) ranks.push_back(rank);
    }
    return ranks.empty() ? nullptr : control_->make_teller(host_word(*claimed_), generation_, ranks);
}

std::shared_ptr<Warden> Runtime::new_warden() const {
    if (!options_.masks_ranks) return nullptr;
    return make_warden_({options_.rank, options_.ranks, generation_, mask_,
                         reinterpret_cast<uint64_t*>(suspects_.get()), progress(), lifelines_});
}

std::shared_ptr<Warden> Runtime::warden() const {
    const std::lock_guard<std::mutex> guard(warden_mutex_);
    return warden_;
}

void Runtime::set_warden(std::shared_ptr<Warden> warden) {
    const std::lock_guard<std::mutex> guard(warden_mutex_);
    warden_.swap(warden);
}

wire::RankMask Runtime::masked() const {
    const auto warden = this->warden();
    return warden ? warden->masked() : wire::RankMask{};
}

void Runtime::watch(const Lifelines::Descriptors& sockets, const Lifelines::Descriptors& processes) {
    lifelines_ = Lifelines(sockets, processes);
    control_->watch(lifelines_);
    if (const auto warden = this->warden()) warden->watch(lifelines_);
}

bool Runtime::mask(int rank) {
    const auto warden = this->warden();
    if (!warden) throw std::logic_error("mask: expected a Buffer that masks ranks");
    return warden->mask(rank);
}

void Runtime::note_told() {
    told_ = true;
    failures_->note_told();
}

bool Runtime::untold() const {
    // Stored by the claiming thread, before it counts the failure: FailureCount::settled() has acquired the count.
    return !told_ && __atomic_load_n(claimed_.get(), __ATOMIC_RELAXED) != 0;
}

std::function<bool(uint64_t)> Runtime::leaving() const {
    if (!told_) return nullptr;
    return [launcher = launcher_, left = all_ended(), in_graphs = in_graphs_.load()](uint64_t nanoseconds) {
        if (nanoseconds == 0) return left() && !in_graphs;
        if (!left() && !launcher->wait_for(left, "kernels of a Buffer", nanoseconds)) return false;
        return !in_graphs || launcher->wait_for_device(nanoseconds);  // the launcher does not track replays
    };
}

bool Runtime::forgive(uint64_t nanoseconds) {
    const uint64_t told = failures_->told();
    const auto count = failures_->settled(*memory_, nanoseconds);
    if (!count) return false;
    memory_->store_words({host_word(context_->failures_known)}, *count);
    forgiven_ = told;
    return true;
}

// Returns a lost peer, or -1. `left`: looks for one that has left, whose process need not have ended.
int Runtime::find_lost(bool left) const {
    for (int peer = 0; peer < options_.ranks; ++peer) {
        if (peer == options_.rank || !present(peer)) continue;
        // If this rank does not receive from the peer, the ranks that wait for the peer detect its loss.
        if (!audience().joins(static_cast<u32>(options_.rank), static_cast<u32>(peer), mask_)) continue;
        if (progress().is_lost(*control_, *memory_, generation_, peer, left)) return peer;
    }
    return -1;
}

bool Runtime::abort_if_lost(Lost& seen) {
    if (options_.masks_ranks) return false;  // the warden masks the peer
    // Ranks that have left are checked last: they may have left for a reason that they have announced, or because a
    // process has died.
    for (const bool left : {false, true}) {
        const int peer = find_lost(left);
        if (peer < 0) continue;
        // A thread that serves the network may not have stored the peer's last signals yet; the second check finds
        // them.
        const Lost lost{peer, left};
        const bool mapped = options_.routes[static_cast<size_t>(peer)] == fabric::kMapped;
        if (!mapped && std::exchange(seen, lost) != lost) return false;
        if (!aborted()) abort(left ? wire::kLeft : control_->how_ended(peer), peer);
        return true;
    }
    return false;
}

// A peer in the same operation, but of another kind or with other arguments, will never end this rank's wait.
bool Runtime::compare_with_peers(Call& call) {
    const uint64_t own = control_->announcement(options_.rank);
    const wire::RankMask unheeded = masked();
    for (int peer = 0; peer < options_.ranks; ++peer) {
        const bool counts = present(peer) && !unheeded.has(static_cast<u32>(peer));
        const uint64_t theirs = counts ? control_->announcement(peer) : 0;
        if (theirs == own || theirs == 0 || own == 0) continue;
        if (wire::announced_operation(theirs) != wire::announced_operation(own)) continue;
        call.mismatch = {peer, wire::announced_kind(theirs)};
        abort(wire::kMismatch, peer);
        return true;
    }
    return false;
}

}  // namespace deep_ep::host
