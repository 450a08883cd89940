#include "host/control/shared_control.h"

#include <algorithm>

#include "host/heap/host_word.h"
#include "observe/observer.h"

namespace deep_ep::host {

SharedControl::SharedControl(int rank, std::vector<std::shared_ptr<uint8_t>> pages, NearParts near,
                             const wire::HeapLayout& layout, Memory& memory, MakeTeller make_teller,
                             const std::vector<int>& far)
    : rank_(rank),
      pages_(std::move(pages)),
      near_parts_(std::move(near)),
      layout_(layout),
      memory_(memory),
      make_teller_(std::move(make_teller)) {
    for (int one = 0; one < static_cast<int>(pages_.size()); ++one) {
        if (std::find(far.begin(), far.end(), one) == far.end()) near_.push_back(one);
    }
}

uint64_t* SharedControl::abort_word(int rank, uint32_t generation) const {
    // Where the parts coincide, the pages may map them a second time.
    uint8_t* const near = near_parts_.coincide() ? nullptr : near_parts_.of(rank);
    return host_word(
        (near != nullptr ? reinterpret_cast<wire::HeapHeader*>(near) : header(rank))->abort_of(generation));
}

void SharedControl::tell_failure(uint64_t word, uint32_t generation) {
    // Any rank may store here, and the last one wins; kernels of all ranks poll the word at system scope. Every mapped
    // rank has the word before this one's caller continues. Therefore a kernel that reads what this rank's user writes
    // into published rows from now on finds the word in its last look (P12, Operation::look_last).
    std::vector<uint64_t*> words;
    for (const int rank : near_) words.push_back(abort_word(rank, generation));
    memory_.store_words(words, word);
}

void SharedControl::stop_own(uint64_t word, uint32_t generation) {
    memory_.store_words({abort_word(rank_, generation)}, word);
}

uint64_t SharedControl::failure(uint32_t generation) const { return memory_.load_word(abort_word(rank_, generation)); }

std::unique_ptr<Teller> SharedControl::make_teller(const uint64_t* claimed, uint32_t generation,
                                                   const std::vector<int>& ranks) {
    return new_teller(claimed, generation, ranks, nullptr);
}

std::unique_ptr<Teller> SharedControl::new_teller(const uint64_t* claimed, uint32_t generation,
                                                  const std::vector<int>& ranks,
                                                  std::function<void(uint64_t)> further) const {
    std::vector<uint64_t*> words;
    for (const int rank : ranks) words.push_back(abort_word(rank, generation));
    uint64_t* const told = near_parts_.coincide() ? nullptr : host_word(header(rank_)->abort_of(generation));
    return make_teller_(claimed,
                        {rank_, generation, std::move(words), std::move(further), told, abort_word(rank_, generation)});
}

// Stored by that rank's kernels; no other data depends on it.
uint64_t SharedControl::announcement(int rank) const {
    const uint64_t* const word = host_word(header(rank)->announcement);
    observe::look(observe::host(static_cast<u32>(rank_)), word);
    return memory_.load_word(word);
}

void SharedControl::clear_announcement(uint32_t) { memory_.store_words({host_word(header(rank_)->announcement)}, 0); }

void SharedControl::set_compiling(bool compiling) {
    memory_.store_words({host_word(header(rank_)->compiling)}, compiling);
}

// Stored by that rank's host; no other data depends on it.
bool SharedControl::compiling(int rank) const { return memory_.load_word(host_word(header(rank)->compiling)) != 0; }

// Stored by an exchange, or in place on return: that rank's last look pairs with it as with any abort word.
void SharedControl::tell_masked(int rank, uint64_t word, uint32_t generation) {
    memory_.store_words({abort_word(rank, generation)}, word);
}

void SharedControl::tell_masks(const wire::RankMask& mask, uint32_t generation) {
    std::vector<uint64_t*> mails;
    for (const int at : near_) {
        if (at != rank_) mails.push_back(host_word(header(at)->mail));
    }
    for (u32 word = 0; word < mask_words(); ++word) {
        std::vector<uint64_t*> words;
        for (const int at : near_) words.push_back(host_word(mask_of(at, rank_, generation).words[word]));
        memory_.store_words(words, mask.words[word]);
    }
    // Hosts that acquire this word find the mask in place. The value differs from all previous ones, of this rank and
    // of others.
    memory_.release_words(mails, ++letters_ << wire::kAbortRankBits | static_cast<uint64_t>(rank_));
}

// Kernels here acquire the bits: the masked ranks have been notified before, and the writes of their NICs to this heap
// precede the exchange (host/network/closing.h). The count is stored last.
void SharedControl::tell_own_masks(const wire::RankMask& mask, uint64_t count) {
    const observe::Accessor host = observe::host(static_cast<u32>(rank_));
    wire::MaskedRanks& masked = header(rank_)->masked;
    for (u32 word = 0; word < mask_words(); ++word) {
        observe::leave(host, host_word(masked.ranks.words[word]), mask.words[word]);
        memory_.store_words({host_word(masked.ranks.words[word])}, mask.words[word]);
    }
    observe::leave(host, host_word(masked.count), count);
    memory_.release_words({host_word(masked.count)}, count);
}

uint64_t SharedControl::mail() const { return memory_.acquire_word(host_word(header(rank_)->mail)); }

// Stored by the other ranks' hosts; acquired, since the masked ranks have been notified before.
wire::RankMask SharedControl::told_masks(uint32_t generation) const {
    wire::RankMask all{};
    for (u32 rank = 0; rank < layout_.ranks; ++rank) {
        wire::RankMask& theirs = mask_of(rank_, static_cast<int>(rank), generation);
        for (u32 word = 0; word < mask_words(); ++word) {
            all.words[word] |= memory_.acquire_word(host_word(theirs.words[word]));
        }
    }
    return all;
}

// Stored by that rank's kernels; no other data depends on it.
uint64_t SharedControl::waiting(int rank) const {
    const uint64_t* const word = host_word(header(rank)->waiting);
    observe::look(observe::host(static_cast<u32>(rank_)), word);
    return memory_.load_word(word);
}

void SharedControl::clear_masks(uint32_t generation) {
    tell_own_masks({}, 0);
    // The count of letters restarts.
    memory_.store_words({host_word(header(rank_)->waiting), host_word(header(rank_)->mail)}, 0);
    for (u32 rank = 0; rank < layout_.ranks; ++rank) {
        for (u32 word = 0; word < mask_words(); ++word) {
            wire::RankMask& theirs = mask_of(rank_, static_cast<int>(rank), generation);
            memory_.store_words({host_word(theirs.words[word])}, 0);
        }
    }
}

void SharedControl::leave() { memory_.release_words({host_word(header(rank_)->left)}, 1); }

// Acquired, so that its stores before its end are visible.
bool SharedControl::left(int rank) const { return memory_.acquire_word(host_word(header(rank)->left)) != 0; }

void SharedControl::tell_stage(const wire::RankMask& mask, uint64_t stage) {
    store_stage(memory_, near_, rank_, mask, stage);
}

void SharedControl::store_stage(Memory& memory, const std::vector<int>& at, int rank, const wire::RankMask& mask,
                                uint64_t stage) const {
    for (u32 word = 0; word < mask_words(); ++word) {
        std::vector<uint64_t*> words;
        for (const int one : at) words.push_back(host_word(recovery_word(one, rank).mask.words[word]));
        memory.store_words(words, mask.words[word]);
    }
    std::vector<uint64_t*> stages;
    for (const int one : at) stages.push_back(host_word(recovery_word(one, rank).stage));
    memory.release_words(stages, stage);
}

// Stored by that rank's host; acquired, so that everything it has done before is visible.
ControlPlane::Stage SharedControl::stage_of(int rank) const {
    wire::RecoveryWord& theirs = recovery_word(rank_, rank);
    Stage found{};
    found.stage = memory_.acquire_word(host_word(theirs.stage));
    for (u32 word = 0; word < mask_words(); ++word) {
        found.mask.words[word] = memory_.acquire_word(host_word(theirs.mask.words[word]));
    }
    found.latest = memory_.acquire_word(host_word(theirs.stage));
    return found;
}

}  // namespace deep_ep::host
