// Communication between the hosts of a Buffer's ranks, in addition to that of their kernels: failures, the current
// operation of each rank, its end, and its progress in a recovery. Apart from networks, which carry rows, no other part
// of the host accesses other ranks' memory or communicates with other machines.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "host/control/lifelines.h"
#include "host/control/teller.h"
#include "wire/rank_mask.h"
#include "wire/signals.h"

namespace deep_ep::host {

class ControlPlane {
  public:
    virtual ~ControlPlane() = default;

    // --- failures (P15)
    // Notifies every rank, including this one, through the abort word of a generation. On return, every rank whose near
    // part this host reaches has the word, including all mapped ranks; the other ranks' hosts relay it.
    virtual void tell_failure(uint64_t word, uint32_t generation) = 0;
    // Notifies only this rank's own kernels.
    virtual void stop_own(uint64_t word, uint32_t generation) = 0;
    // The abort word of this rank in a generation.
    virtual uint64_t failure(uint32_t generation) const = 0;
    // Makes the agent that notifies `ranks`, which kernels do not reach, of the failures that kernels claim. `claimed`:
    // Context::claimed.
    virtual std::unique_ptr<Teller> make_teller(const uint64_t* claimed, uint32_t generation,
                                                const std::vector<int>& ranks) = 0;

    // --- the current operation of a rank
    // The operation as announced by its kernels; 0: none yet.
    virtual uint64_t announcement(int rank) const = 0;
    // Called before a generation begins; no kernel runs.
    virtual void clear_announcement(uint32_t generation) = 0;
    virtual void set_compiling(bool compiling) = 0;
    virtual bool compiling(int rank) const = 0;

    // --- ranks that are masked in a generation (P17)
    // Notifies a rank, whose near part this host reaches, that the others continue without it; see wire::kMasked. It
    // has the word on return.
    virtual void tell_masked(int rank, uint64_t word, uint32_t generation) = 0;
    // Tells every other rank which ranks this one masks.
    virtual void tell_masks(const wire::RankMask& mask, uint32_t generation) = 0;
    // Tells this rank's kernels which ranks are masked. `count`: the number of such changes.
    virtual void tell_own_masks(const wire::RankMask& mask, uint64_t count) = 0;
    // A word that changes when another rank has reported which ranks it masks.
    virtual uint64_t mail() const = 0;
    // All ranks that have been reported to this one as masked.
    virtual wire::RankMask told_masks(uint32_t generation) const = 0;
    // The rank for which `rank`'s kernels have been waiting for some time, as a wire::waiting_word(); 0: none.
    virtual uint64_t waiting(int rank) const = 0;
    // Called before a generation begins; no kernel runs, and no rank masks any in it.
    virtual void clear_masks(uint32_t generation) = 0;

    // --- the end of a rank
    // Announces that this rank stores nothing any more. Its stores are visible to a rank that sees left().
    virtual void leave() = 0;
    virtual bool left(int rank) const = 0;
    // Whether its process has ended or is ending. Its earlier stores are then visible.
    virtual bool ended(int rank) const = 0;
    // Whether it is known that none of its stores arrives here from now on (P16, P19).
    virtual bool gone(int rank) const = 0;
    // How a rank that has ended or is gone did so, as a wire::Reason.
    virtual uint32_t how_ended(int) const { return wire::kDied; }
    // Sets the descriptors that show the end of peers' processes.
    virtual void watch(Lifelines lifelines) = 0;
    // Whether the ends of processes are visible at all.
    virtual bool watches() const = 0;

    // --- the network of a rank
    // Sends the address page of this rank to the other ranks.
    virtual void tell_address() {}

    // --- recovery (P16)
    struct Stage {
        wire::RankMask mask;  // the ranks that it leaves out
        uint64_t stage;       // only grows
        uint64_t latest;      // the stage after the mask was read; if of another attempt, the mask may be so too
    };
    // Stores the mask first. Everything this rank has done before is visible to a rank that sees the stage.
    virtual void tell_stage(const wire::RankMask& mask, uint64_t stage) = 0;
    virtual Stage stage_of(int rank) const = 0;
};

// `memory`: that of the rank whose control plane it is; outlives it.
using MakeControl = std::function<std::unique_ptr<ControlPlane>(Memory& memory)>;

}  // namespace deep_ep::host
