// A Runtime goes on after a failure (P16).
//
// Ranks meet twice, by words in the headers of their heaps. Before the first meeting each one's kernels have left and
// its network has been rebuilt; no rank goes on from it before it knows that every rank left out is gone. So after it
// nothing of the old generation is on its way to any heap, and each rank clears the signal words of the bank that comes
// next. After the second meeting all have done so, and may be sent to.
#include <stdexcept>

#include "host/heap/host_word.h"
#include "host/session/runtime.h"

namespace deep_ep::host {
namespace {

constexpr uint64_t stage_of(uint64_t attempt, bool again) { return attempt << 1 | (again ? 1 : 0); }

}  // namespace

bool Runtime::stop_all(uint64_t nanoseconds) {
    // Nothing is told any more of this generation, whose words others are about to leave.
    teller_.reset();
    set_warden(nullptr);
    const uint64_t word = wire::abort_word(generation_, wire::kException, static_cast<u32>(options_.rank), -1);
    // A word that is there stays: it says more, and one that masks this rank keeps its kernels from telling others.
    if (!aborted()) control_->stop_own(word, generation_);
    if (!settle(nanoseconds) || !launcher_->wait_for_device(nanoseconds)) return false;
    networks_ = {};  // before the next are made: no agent of the old ones is left
    return true;
}

void Runtime::connect(const wire::RankMask& mask, uint32_t generation) {
    const std::vector<fabric::Route> reached = routes(mask);
    networks_ = make_networks_(*memory_, reached, generation, host_words_.get());
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
    // A rank that was left out was known to be gone, and stays so: what told of it is closed since, and its
    // descriptors' numbers may be other files' by now.
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
            // It has stored that mask for this attempt if it is in no other yet.
            const bool same = latest >> 1 == attempt;
            if (stage >> 1 == attempt && same && theirs.first_difference(mask) != wire::kMaxRanks) {
                meeting = {Meeting::kOtherMask, peer, theirs};
                return true;
            }
            if (stage >> 1 > attempt || (stage >> 1 == attempt && !same)) {
                meeting = {Meeting::kGivenUp, peer, {}};
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
    if (generation >= kMaxGenerations) throw std::overflow_error("a Buffer recovers fewer than 2^20 times");
    const wire::HeapLayout heap = heap_layout(options_);
    u8* bank = reinterpret_cast<u8*>(heap_base(options_.rank)) + heap.bank_offset(generation);
    // The abort word stays: it is of an older generation, which is as good as clear, or of this one already.
    memory_->fill(bank, 0, heap.bank_bytes());
    // No total of the generation before is stored any more: its network is gone, and the new one has heard of nothing.
    if (host_words_) {
        u8* const words = host_words_.get() + generation % wire::kBanks * heap.bank_bytes();
        memory_->fill(words, 0, heap.bank_bytes());
    }
    memory_->fill(base_.get(), 0, heap.words() * sizeof(u64));
    memory_->fill(slots_read_.get(), 0, slots_read() * sizeof(u32));
    control_->clear_announcement(generation);
    if (options_.masks_ranks) {
        control_->clear_masks(generation);
        memory_->fill(decisions_.get(), 0, heaps_.size() * static_cast<size_t>(options_.regions) * sizeof(u64));
        // No kernel runs, and no warden.
        for (size_t rank = 0; rank < heaps_.size(); ++rank)
            __atomic_store_n(&suspects_.get()[rank], 0, __ATOMIC_RELAXED);
    }
    *farewell_ = {};
    // Calls of graphs will run again: what they leave is of their own generation alone.
    std::erase_if(calls_, [](const std::shared_ptr<Call>& call) { return call->serial != 0; });
    // A peer may have failed before it mapped what this rank took for mapped: it is announced again (P10).
    arena_->share_first_only();
}

void Runtime::publish(uint32_t generation, const wire::RankMask& mask) {
    mask_ = mask;
    __atomic_store_n(claimed_.get(), 0, __ATOMIC_RELAXED);  // no kernel runs
    told_ = false;
    failures_->note_told();
    // Under the old generation, in which every kernel leaves at once; then the one store that begins the new one.
    write_context(Sequence{generation_, 0, 0}.word());
    memory_->store_words({host_word(context_->sequence)}, Sequence{generation, 0, 0}.word());
    generation_ = generation;
    for (const auto& call : calls_) call->generation = generation;
    teller_ = teller();
    set_warden(new_warden());
}

}  // namespace deep_ep::host
