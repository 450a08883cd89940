// The control plane of several machines: like SharedControl among ranks of the same machine, by frames to the others.
//
// For a rank on another machine, this process has a copy of the control pages with the state that the rank has
// reported. It is read like the pages of a rank on the same machine.
#pragma once

#include <mutex>

#include "host/control/machines/mesh.h"
#include "host/control/shared_control.h"

namespace deep_ep::host {

class MachinesControl final : public SharedControl, private Mesh::Listener {
  public:
    // `pages`: copies for the ranks that the mesh connects. `memory`: for the mesh's thread, and for actions of other
    // threads than the launching one.
    MachinesControl(int rank, std::vector<std::shared_ptr<uint8_t>> pages, NearParts near,
                    const wire::HeapLayout& layout, Memory& own_memory, MakeTeller make_teller,
                    std::shared_ptr<Mesh> mesh, std::unique_ptr<Memory> memory);
    ~MachinesControl() override { mesh_->listen(nullptr); }

    void tell_failure(uint64_t word, uint32_t generation) override;
    std::unique_ptr<Teller> make_teller(const uint64_t* claimed, uint32_t generation,
                                        const std::vector<int>& ranks) override;
    void clear_announcement(uint32_t generation) override;
    void set_compiling(bool compiling) override;
    void leave() override;
    bool ended(int rank) const override;
    bool gone(int rank) const override;
    uint32_t how_ended(int rank) const override;
    bool watches() const override { return true; }
    void tell_stage(const wire::RankMask& mask, uint64_t stage) override;
    void tell_address() override;

  private:
    wire::control::Beat own_beat() override;
    void beat(int from, const wire::control::Beat& beat) override;
    void abort(const wire::control::Abort& abort) override;
    void stage(int from, const wire::RecoveryWord& stage) override;
    void address(int from, const wire::NetworkAddress& address) override;

    bool is_far(int rank) const { return mesh_->connects(rank); }

    const std::shared_ptr<Mesh> mesh_;
    const std::unique_ptr<Memory> memory_;
    std::mutex announcing_;    // guards `generation_` and the announcements in the copies
    uint32_t generation_ = 1;  // of the announcements
};

}  // namespace deep_ep::host
