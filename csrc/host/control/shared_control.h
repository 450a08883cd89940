// The control plane of one machine. It uses the control pages of all ranks' heaps, which each rank's host has mapped,
// and descriptors that show the end of processes.
#pragma once

#include <functional>

#include "host/control/control_plane.h"
#include "host/heap/memory.h"
#include "host/heap/near_parts.h"
#include "wire/heap_layout.h"

namespace deep_ep::host {

class SharedControl : public ControlPlane {
  public:
    using MakeTeller = std::function<std::unique_ptr<Teller>(const uint64_t* claimed, Teller::Others others)>;

    // `pages`: the control pages of every rank, at their addresses in this process. `memory` outlives this. `far`:
    // ranks whose pages are only read here, since they are copies of data received by other means.
    SharedControl(int rank, std::vector<std::shared_ptr<uint8_t>> pages, NearParts near, const wire::HeapLayout& layout,
                  Memory& memory, MakeTeller make_teller, const std::vector<int>& far = {});

    void tell_failure(uint64_t word, uint32_t generation) override;
    void stop_own(uint64_t word, uint32_t generation) override;
    uint64_t failure(uint32_t generation) const override;
    std::unique_ptr<Teller> make_teller(const uint64_t* claimed, uint32_t generation,
                                        const std::vector<int>& ranks) override;
    uint64_t announcement(int rank) const override;
    void clear_announcement(uint32_t generation) override;
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

  protected:
    int rank() const { return rank_; }
    wire::HeapHeader* header(int rank) const {
        return reinterpret_cast<wire::HeapHeader*>(pages_[static_cast<size_t>(rank)].get());
    }
    wire::NetworkAddress& address_of(int rank) const {
        return *reinterpret_cast<wire::NetworkAddress*>(pages_[static_cast<size_t>(rank)].get() +
                                                        layout_.address_offset());
    }
    std::unique_ptr<Teller> new_teller(const uint64_t* claimed, uint32_t generation, const std::vector<int>& ranks,
                                       std::function<void(uint64_t)> further) const;
    // Stores the stage that `rank` has reached in the pages of the ranks `at`, the mask first.
    void store_stage(Memory& memory, const std::vector<int>& at, int rank, const wire::RankMask& mask,
                     uint64_t stage) const;
    // Where this host tells a rank of a failure: in its near part, or in its far part, where that rank's host finds it.
    uint64_t* abort_word(int rank, uint32_t generation) const;

  private:
    // The word in the pages of `at` that holds the stage of `rank`.
    wire::RecoveryWord& recovery_word(int at, int rank) const {
        return *reinterpret_cast<wire::RecoveryWord*>(pages_[static_cast<size_t>(at)].get() +
                                                      layout_.recovery_offset(static_cast<u32>(rank)));
    }
    // The mask in the pages of `at` with the ranks that `rank` masks.
    wire::RankMask& mask_of(int at, int rank, uint32_t generation) const {
        return *reinterpret_cast<wire::RankMask*>(pages_[static_cast<size_t>(at)].get() +
                                                  layout_.mask_offset(generation, static_cast<u32>(rank)));
    }
    u32 mask_words() const { return wire::RankMask::used(layout_.ranks); }
    const int rank_;
    const std::vector<std::shared_ptr<uint8_t>> pages_;
    const NearParts near_parts_;
    std::vector<int> near_;  // ranks, including this one, into whose pages it stores
    const wire::HeapLayout layout_;
    Memory& memory_;
    const MakeTeller make_teller_;
    Lifelines lifelines_;
    uint64_t letters_ = 0;  // see mail()
};

}  // namespace deep_ep::host
