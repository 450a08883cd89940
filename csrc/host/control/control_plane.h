// What the hosts of a Buffer's ranks tell each other, beside what their kernels do: failures, what each is at, its end,
// and how far it is in a recovery. But for networks, which carry rows, no other part of a host looks into other ranks'
// memory, or talks to other machines.
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
    // Tells every rank, this one included, by the abort word of a generation. When it returns all of them have it.
    virtual void tell_failure(uint64_t word, uint32_t generation) = 0;
    // Tells this rank's own kernels alone.
    virtual void stop_own(uint64_t word, uint32_t generation) = 0;
    // The abort word that this rank has in a generation.
    virtual uint64_t failure(uint32_t generation) const = 0;
    // What tells `ranks`, which kernels do not reach, of the failures that they claim. `claimed`: Context::claimed.
    virtual std::unique_ptr<Teller> make_teller(const uint64_t* claimed, uint32_t generation,
                                                const std::vector<int>& ranks) = 0;

    // --- what a rank is at
    // As its kernels have announced it; 0: nothing yet.
    virtual uint64_t announcement(int rank) const = 0;
    // Before a generation begins; no kernel runs.
    virtual void clear_announcement(uint32_t generation) = 0;
    virtual void set_compiling(bool compiling) = 0;
    virtual bool compiling(int rank) const = 0;

    // --- ranks that are masked in a generation (P17)
    // Tells a rank that the others go on without it; see wire::kMasked. When it returns that rank has the word.
    virtual void tell_masked(int rank, uint64_t word, uint32_t generation) = 0;
    // Tells every other rank which ones this rank masks.
    virtual void tell_masks(const wire::RankMask& mask, uint32_t generation) = 0;
    // Tells this rank's kernels which ranks are masked. `count`: of such changes.
    virtual void tell_own_masks(const wire::RankMask& mask, uint64_t count) = 0;
    // Changes when another rank has told which ones it masks.
    virtual uint64_t mail() const = 0;
    // All that this rank has been told of.
    virtual wire::RankMask told_masks(uint32_t generation) const = 0;
    // For whom a rank's kernels have waited for some time: wire::waiting_word(); 0: for none.
    virtual uint64_t waiting(int rank) const = 0;
    // Before a generation begins; no kernel runs, and no rank masks any in it.
    virtual void clear_masks(uint32_t generation) = 0;

    // --- its end
    // This rank stores nothing any more. What it has stored is visible to one that sees left().
    virtual void leave() = 0;
    virtual bool left(int rank) const = 0;
    // Its process has ended, or is ending: what it has stored before is visible then.
    virtual bool ended(int rank) const = 0;
    // It is known that nothing which it stores from now on arrives here (P16, P19).
    virtual bool gone(int rank) const = 0;
    // Of one that has ended or is gone: in what way, as a wire::Reason.
    virtual uint32_t how_ended(int) const { return wire::kDied; }
    // Peers live in processes whose end shows there.
    virtual void watch(Lifelines lifelines) = 0;
    // Whether ends of processes show at all.
    virtual bool watches() const = 0;

    // --- its network
    // What the address page of this rank holds is to be in other ranks' hands.
    virtual void tell_address() {}

    // --- recovery (P16)
    struct Stage {
        wire::RankMask mask;  // the ranks that it leaves out
        uint64_t stage;       // only grows
        uint64_t latest;      // the stage after the mask was looked at: of another attempt, the mask may be too
    };
    // The mask first. What this rank has done before is visible to one that sees the stage.
    virtual void tell_stage(const wire::RankMask& mask, uint64_t stage) = 0;
    virtual Stage stage_of(int rank) const = 0;
};

// `memory`: of the rank that it is for; it outlives it.
using MakeControl = std::function<std::unique_ptr<ControlPlane>(Memory& memory)>;

}  // namespace deep_ep::host
