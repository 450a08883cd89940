// Recovery of a Runtime after a failure (P16).
//
// Ranks meet twice, through words in the headers of their heaps. Before the first meeting, each rank's kernels have
// left and its network has been rebuilt; no rank continues from the meeting before it knows that every rank left out is
// gone. Hence no data of the old generation is in flight to any heap afterwards, and each rank clears the signal words
// of the next bank. After the second meeting all ranks have done so and may be sent to.
#include <stdexcept>

#include "host/heap/host_word.h"
#include "host/session/runtime.h"

namespace deep_ep::host {
namespace {

constexpr uint64_t stage_of(uint64_t attempt, bool again) { return attempt << 1 | (again ? 1 : 0); }

}  // namespace

bool Runtime::stop_all(uint64_t nanoseconds) {
    // Stops all notifications for this generation, whose words the others are about to abandon.
    teller_.reset();
    set_warden(nullptr);
    const uint64_t word = wire::abort_word(generation_, wire::kException, static_cast<u32>(options_.rank), -1);
    // An existing abort word stays: it says more, and one that masks this rank keeps its kernels from notifying others.
    if (!aborted()) control_->stop_own(word, generation_);
    return settle(nanoseconds) && launcher_->wait_for_device(nanoseconds);
}

void Runtime::connect(const wire::RankMask& mask, uint32_t generation) {
    const std::vector<fabric::Route> reached = routes(mask);
    networks_ = {};  // before the next ones are made, so that no agent of the old ones remains
    networks_ = make_networks_(*memory_, reached, generation);
    control_->tell_address();
    memory_->write(routes_.get(), reached.data(), reached.size() * sizeof(fabric::Route));
}

int Runtime::look_up_peers(uint64_t nanoseconds) {
    int missing = networks_.look_up_peers();
    const auto known = [&] { return (missing = networks_.look_up_peers()) < 0; };
    if (missing >= 0) launcher_->wait_for(known, "other ranks' networks", nanoseconds);
    return missing;
}

bool Runtime::gone(int rank) const {
    // A rank that was left out was known to be gone, and remains so. Its descriptors have been closed since, and their
    // numbers may belong to other files by now.
    return !present(rank) || control_->gone(rank);
}

int Runtime::wait_gone(const wire::RankMask& mask, uint64_t nanoseconds) {
    for (int rank = 0; rank < options_.ranks; ++rank) {
        if (!mask.has(static_cast<u32>(rank))) continue;
        const auto ended = [this, rank] { return gone(rank); };
        if (!ended() && !launcher_->wait_for(ended, "the end of a rank", nanoseconds)) return rank;
    }
    return -1;
}

Meeting Runtime::meet(const wire::RankMask& mask, uint64_t attempt, bool again, uint64_t nanoseconds) {
    const observe::Accessor host = observe::host(static_cast<u32>(options_.rank));
    observe::tell_hosts(host);
    control_->tell_stage(mask, stage_of(attempt, again));
    Meeting meeting;
    const auto over = [&] {
        meeting = {};
        for (int peer = 0; peer < options_.ranks; ++peer) {
            if (peer == options_.rank || mask.has(static_cast<u32>(peer))) continue;
            const auto [theirs, stage, latest] = control_->stage_of(peer);
            // The mask is the one of this attempt if the peer has not begun another attempt.
            const bool same = latest >> 1 == attempt;
            if (stage >> 1 == attempt && same && theirs.first_difference(mask) != wire::kMaxRanks) {
                meeting = {Meeting::kOtherMask, peer, theirs};
                return true;
            }
            if (latest >> 1 > attempt) {
                meeting = {Meeting::kLaterAttempt, peer, {}, latest >> 1};
                return true;
            }
            if (stage >= stage_of(attempt, again)) continue;
            if (meeting.result == Meeting::kMet) meeting = {Meeting::kLate, peer, {}};
            if (!gone(peer)) continue;
            meeting = {Meeting::kGone, peer, {}};
            return true;
        }
        return meeting.result == Meeting::kMet;
    };
    if (!over()) launcher_->wait_for(over, "ranks that recover", nanoseconds);
    if (meeting.result == Meeting::kMet) observe::hear_hosts(host);
    return meeting;
}

void Runtime::clear_words(uint32_t generation) {
    if (generation >= kMaxGenerations) throw std::overflow_error("a Buffer can recover fewer than 2^20 times");
    const wire::HeapLayout heap = heap_layout(options_);
    // The abort words stay: each is either of an older generation, which is as good as clear, or already of this one.
    // No NIC adds to a word of the far part any more, and no host stores one: the network of the previous generation no
    // longer exists, and the new one has received nothing.
    u8* const near = near_.of(options_.rank) + heap.bank_offset(generation);
    memory_->fill(near, 0, heap.bank_bytes());
    u8* const far = reinterpret_cast<u8*>(heap_base(options_.rank)) + heap.bank_offset(generation);
    if (!near_.coincide()) memory_->fill(far, 0, heap.bank_bytes());
    memory_->fill(base_.get(), 0, heap.words() * sizeof(u64));
    memory_->fill(slots_read_.get(), 0, slots_read() * sizeof(u32));
    control_->clear_announcement(generation);
    if (options_.masks_ranks) {
        control_->clear_masks(generation);
        memory_->fill(decisions_.get(), 0, heaps_.size() * static_cast<size_t>(options_.regions) * sizeof(u64));
        // Neither a kernel nor a warden runs.
        for (size_t rank = 0; rank < heaps_.size(); ++rank)
            __atomic_store_n(&suspects_.get()[rank], 0, __ATOMIC_RELAXED);
    }
    *farewell_ = {};
    // Calls in graphs stay, since they will run again: the records that they leave belong to their own generation only.
    {
        const std::lock_guard<std::mutex> guard(calls_->mutex);
        std::erase_if(calls_->in_use, [](const std::shared_ptr<Call>& call) { return call->serial != 0; });
    }
    // A peer may have failed before it mapped memory that this rank took for mapped, so the memory is announced again
    // (P10).
    arena_->share_first_only();
}

void Runtime::publish(uint32_t generation, const wire::RankMask& mask) {
    mask_ = mask;
    __atomic_store_n(claimed_.get(), 0, __ATOMIC_RELAXED);  // no kernel runs
    told_ = false;
    failures_->note_told();
    // First under the old generation, in which every kernel leaves at once; then the single store that begins the new
    // one.
    write_context(Sequence{generation_, 0, 0}.word());
    memory_->store_words({host_word(context_->sequence)}, Sequence{generation, 0, 0}.word());
    generation_ = generation;
    for (const auto& call : calls_->in_use) call->generation = generation;
    teller_ = teller();
    set_warden(new_warden());
}

}  // namespace deep_ep::host
