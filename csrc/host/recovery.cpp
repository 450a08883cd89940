// A Runtime goes on after a failure (P16).
//
// Ranks meet twice, by words in the headers of their heaps. Before the first meeting each one's kernels have left and
// its network has been made anew; nobody goes on from it before it knows that every rank left out is gone. So after it
// nothing of the old generation is on its way to any heap, and each clears its own words. After the second all have,
// and may be sent to.
#include "host/runtime.h"

namespace deep_ep::host {
namespace {

uint64_t* host_word(u64& word) { return reinterpret_cast<uint64_t*>(&word); }

constexpr uint64_t stage_of(uint64_t attempt, bool again) { return attempt << 1 | (again ? 1 : 0); }

}  // namespace

bool Runtime::stop_all(uint64_t nanoseconds) {
    const uint64_t word = wire::abort_word(generation_, wire::kException, static_cast<u32>(options_.rank), -1);
    memory_->store_words({host_word(header(options_.rank)->abort)}, word);
    if (!settle(nanoseconds)) return false;
    network_.reset();
    if (make_network_) network_ = make_network_();
    return true;
}

bool Runtime::gone(int rank) const {
    // A rank that was left out was known to be gone, and stays so: what told of it is closed since, and its
    // descriptors' numbers may be other files' by now.
    if (!present(rank)) return true;
    // Either says that its stores are over, and shows them.
    return memory_->acquire_word(host_word(header(rank)->left)) != 0 || lifelines_.ended(rank);
}

int Runtime::wait_gone(uint64_t mask, uint64_t nanoseconds) {
    for (int rank = 0; rank < options_.ranks; ++rank) {
        if ((mask >> rank & 1) == 0) continue;
        const auto ended = [this, rank] { return gone(rank); };
        if (!ended() && !launcher_->wait_for(ended, "the end of a rank", nanoseconds)) return rank;
    }
    return -1;
}

Meeting Runtime::meet(uint64_t mask, uint64_t attempt, bool again, uint64_t nanoseconds) {
    const auto me = static_cast<size_t>(options_.rank);
    std::vector<uint64_t*> masks, stages;
    for (int rank = 0; rank < options_.ranks; ++rank) {
        masks.push_back(host_word(header(rank)->recovery[me].mask));
        stages.push_back(host_word(header(rank)->recovery[me].stage));
    }
    memory_->store_words(masks, mask);
    memory_->release_words(stages, stage_of(attempt, again));

    Meeting meeting;
    const auto over = [&] {
        meeting = {};
        for (int peer = 0; peer < options_.ranks; ++peer) {
            if (peer == options_.rank || (mask >> peer & 1) != 0) continue;
            wire::RecoveryWord& word = header(options_.rank)->recovery[peer];
            const uint64_t stage = memory_->acquire_word(host_word(word.stage));
            const uint64_t theirs = memory_->acquire_word(host_word(word.mask));
            // It has stored that mask for this attempt if it is in no other yet.
            const bool same = memory_->acquire_word(host_word(word.stage)) >> 1 == attempt;
            if (stage >> 1 == attempt && same && theirs != mask) {
                meeting = {Meeting::kOtherMask, peer, theirs};
                return true;
            }
            if (stage >> 1 > attempt || (stage >> 1 == attempt && !same)) {
                meeting = {Meeting::kGivenUp, peer, 0};
                return true;
            }
            if (stage >= stage_of(attempt, again)) continue;
            if (meeting.result == Meeting::kMet) meeting = {Meeting::kLate, peer, 0};
            if (!gone(peer)) continue;
            meeting = {Meeting::kGone, peer, 0};
            return true;
        }
        return meeting.result == Meeting::kMet;
    };
    if (!over()) launcher_->wait_for(over, "ranks that recover", nanoseconds);
    return meeting;
}

void Runtime::start_generation(uint32_t generation, uint64_t mask) {
    const wire::HeapLayout heap = heap_layout(options_);
    memory_->fill(reinterpret_cast<u8*>(heap_base(options_.rank)) + heap.words_offset(), 0, heap.words() * sizeof(u64));
    memory_->fill(base_.get(), 0, heap.words() * sizeof(u64));
    memory_->store_words({host_word(header(options_.rank)->announcement)}, 0);
    *farewell_ = {};
    calls_.clear();
    // A peer may have failed before it mapped what this rank took for mapped: it is announced once more (P10).
    arena_->share_first_only();
    generation_ = generation;
    mask_ = mask;
    write_context();
}

}  // namespace deep_ep::host
