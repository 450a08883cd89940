// The control plane of one machine: in the control pages of all ranks' heaps, which each rank's host has mapped, and by
// descriptors that tell of processes.
#pragma once

#include <functional>

#include "host/control/control_plane.h"
#include "host/heap/memory.h"
#include "wire/heap_layout.h"

namespace deep_ep::host {

class SharedControl final : public ControlPlane {
  public:
    using MakeTeller = std::function<std::unique_ptr<Teller>(const uint64_t* claimed, std::vector<uint64_t*> words)>;

    // `pages`: every rank's control pages, as this process reaches them. `memory` lives longer.
    SharedControl(int rank, std::vector<std::shared_ptr<uint8_t>> pages, const wire::HeapLayout& layout, Memory& memory,
                  MakeTeller make_teller)
        : rank_(rank),
          pages_(std::move(pages)),
          layout_(layout),
          memory_(memory),
          make_teller_(std::move(make_teller)) {}

    void tell_failure(uint64_t word, uint32_t generation) override;
    void stop_own(uint64_t word, uint32_t generation) override;
    uint64_t failure(uint32_t generation) const override;
    std::unique_ptr<Teller> make_teller(const uint64_t* claimed, uint32_t generation,
                                        const std::vector<int>& ranks) override;
    uint64_t announcement(int rank) const override;
    void clear_announcement() override;
    void set_compiling(bool compiling) override;
    bool compiling(int rank) const override;
    void tell_masked(int rank, uint64_t word, uint32_t generation) override;
    void tell_masks(const wire::RankMask& mask, uint32_t generation) override;
    void tell_own_masks(const wire::RankMask& mask, uint64_t count) override;
    uint64_t mail() const override;
    wire::RankMask told_masks(uint32_t generation) const override;
    uint64_t waiting(int rank) const override;
    void clear_masks(uint32_t generation) override;
    void leave() override;
    bool left(int rank) const override;
    bool ended(int rank) const override { return lifelines_.ended(rank); }
    bool gone(int rank) const override { return left(rank) || lifelines_.gone(rank); }
    void watch(Lifelines lifelines) override { lifelines_ = std::move(lifelines); }
    bool watches() const override { return !lifelines_.empty(); }
    void tell_stage(const wire::RankMask& mask, uint64_t stage) override;
    Stage stage_of(int rank) const override;

  private:
    wire::HeapHeader* header(int rank) const {
        return reinterpret_cast<wire::HeapHeader*>(pages_[static_cast<size_t>(rank)].get());
    }
    // In the pages of `at`: what `rank` has told.
    wire::RecoveryWord& recovery_word(size_t at, int rank) const {
        return *reinterpret_cast<wire::RecoveryWord*>(pages_[at].get() +
                                                      layout_.recovery_offset(static_cast<u32>(rank)));
    }
    // In the pages of `at`: the ranks that `rank` masks.
    wire::RankMask& mask_of(size_t at, int rank, uint32_t generation) const {
        return *reinterpret_cast<wire::RankMask*>(pages_[at].get() +
                                                  layout_.mask_offset(generation, static_cast<u32>(rank)));
    }
    u32 mask_words() const { return wire::RankMask::used(layout_.ranks); }
    uint64_t* abort_word(int rank, uint32_t generation) const;

    const int rank_;
    const std::vector<std::shared_ptr<uint8_t>> pages_;
    const wire::HeapLayout layout_;
    Memory& memory_;
    const MakeTeller make_teller_;
    Lifelines lifelines_;
    uint64_t letters_ = 0;  // see mail()
};

}  // namespace deep_ep::host
