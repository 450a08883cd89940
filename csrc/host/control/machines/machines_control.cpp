#include "host/control/machines/machines_control.h"

#include "host/heap/address_page.h"
#include "host/heap/host_word.h"

namespace deep_ep::host {

using namespace wire::control;

namespace {

// Bounded, since a rank that is stopped does not confirm; its kernels do not run either.
constexpr u64 kConfirmNs = 1'000'000'000;

}  // namespace

MachinesControl::MachinesControl(int rank, std::vector<std::shared_ptr<uint8_t>> pages, NearParts near,
                                 const wire::HeapLayout& layout, Memory& own_memory, MakeTeller make_teller,
                                 std::shared_ptr<Mesh> mesh, std::unique_ptr<Memory> memory)
    : SharedControl(rank, std::move(pages), std::move(near), layout, own_memory, std::move(make_teller), mesh->ranks()),
      mesh_(std::move(mesh)),
      memory_(std::move(memory)) {
    mesh_->listen(this);
}

void MachinesControl::tell_failure(uint64_t word, uint32_t generation) {
    mesh_->tell(kAbort, Abort{generation, word});
    SharedControl::tell_failure(word, generation);
    mesh_->confirm(kConfirmNs);
}

std::unique_ptr<Teller> MachinesControl::make_teller(const uint64_t* claimed, uint32_t generation,
                                                     const std::vector<int>& ranks) {
    std::vector<int> near;
    for (const int rank : ranks) {
        if (!is_far(rank)) near.push_back(rank);
    }
    return new_teller(claimed, generation, near,
                      [mesh = mesh_, generation](uint64_t word) { mesh->tell(kAbort, Abort{generation, word}); });
}

// Announcements of others in the previous generation say nothing about this one, and may still be in flight.
void MachinesControl::clear_announcement(uint32_t generation) {
    const std::lock_guard<std::mutex> lock(announcing_);
    SharedControl::clear_announcement(generation);
    for (const int rank : mesh_->ranks()) memory_->store_words({host_word(header(rank)->announcement)}, 0);
    generation_ = generation;
}

void MachinesControl::set_compiling(bool compiling) {
    SharedControl::set_compiling(compiling);
    mesh_->tell_beat();
}

// Stores the word in the page first, so that the following beats report it too.
void MachinesControl::leave() {
    SharedControl::leave();
    mesh_->tell(kBeat, own_beat());
    mesh_->confirm(kConfirmNs);
}

bool MachinesControl::ended(int rank) const {
    return is_far(rank) ? mesh_->state(rank) != Mesh::State::kHeard : SharedControl::ended(rank);
}

uint32_t MachinesControl::how_ended(int rank) const {
    const Mesh::State state = mesh_->state(rank);
    return state == Mesh::State::kSilent    ? wire::kSilent
           : state == Mesh::State::kUnheard ? wire::kUnheard
                                            : wire::kDied;
}

bool MachinesControl::gone(int rank) const {
    return is_far(rank) ? left(rank) || ended(rank) : SharedControl::gone(rank);
}

void MachinesControl::tell_stage(const wire::RankMask& mask, uint64_t stage) {
    SharedControl::tell_stage(mask, stage);
    mesh_->tell(kStage, wire::RecoveryWord{mask, stage});
}

void MachinesControl::tell_address() { mesh_->tell(kAddress, address_of(rank())); }

// --- in the mesh's thread

Beat MachinesControl::own_beat() {
    wire::HeapHeader& own = *header(rank());
    const std::lock_guard<std::mutex> lock(announcing_);
    // No other data depends on these words. Kernels store the announcement, this rank's host the others.
    return {generation_, memory_->load_word(host_word(own.announcement)), memory_->load_word(host_word(own.compiling)),
            memory_->load_word(host_word(own.left))};
}

// Stores the words that, for ranks on the same machine, their hosts or kernels store and SharedControl loads.
void MachinesControl::beat(int from, const Beat& beat) {
    wire::HeapHeader& theirs = *header(from);
    {
        const std::lock_guard<std::mutex> lock(announcing_);
        const u64 announcement = beat.generation == generation_ ? beat.announcement : 0;
        memory_->store_words({host_word(theirs.announcement)}, announcement);
    }
    memory_->store_words({host_word(theirs.compiling)}, beat.compiling);
    // A beat that was made before the rank left may arrive after the one that reports its leaving.
    if (beat.left != 0) memory_->release_words({host_word(theirs.left)}, beat.left);
}

// Stored as by any rank on the same machine, since kernels here poll it.
void MachinesControl::abort(const Abort& abort) {
    memory_->store_words({abort_word(rank(), static_cast<uint32_t>(abort.generation))}, abort.word);
}

void MachinesControl::stage(int from, const wire::RecoveryWord& stage) {
    store_stage(*memory_, {rank()}, from, stage.mask, stage.stage);
}

void MachinesControl::address(int from, const wire::NetworkAddress& address) {
    AddressPage(address_of(from), address.generation).publish(address.bytes, sizeof(address.bytes));
}

}  // namespace deep_ep::host
