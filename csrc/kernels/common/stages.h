// The time at which each warp of a kernel has ended each of its stages, noted on request.
#pragma once

#include "device/device.h"

// Whether kernels can note it: by default they do so where the host gives them room.
#ifndef DEEP_EP_NOTES_STAGES
#define DEEP_EP_NOTES_STAGES 1
#endif

namespace deep_ep {

constexpr bool kNotesStages = DEEP_EP_NOTES_STAGES != 0;

// A kernel has some of these, in an order of its own. Where it takes one several times, the last time counts.
enum class Stage : u32 {
    kBegin,  // no stage: the time at which the first one begins
    kEnter,
    kNumber,
    kRoute,
    kStore,
    kSignal,
    kKeep,
    kCounts,
    kPlan,
    kOffers,
    kRoutings,
    kResults,
    kPlace,
    kSum,
    kServe,
    kFinish,
    kCount
};
constexpr u32 kStages = static_cast<u32>(Stage::kCount);

constexpr const char* kStageNames[] = {"",           "enter",        "number tokens",    "send routings",
                                       "store rows", "signal",       "note own choices", "await counts",
                                       "sum counts", "await offers", "await routings",   "await results",
                                       "place rows", "sum rows",     "serve chunks",     "finish"};
static_assert(sizeof(kStageNames) / sizeof(*kStageNames) == kStages, "stages: each has a name");

// What a warp notes: nothing, unless this kernel is compiled for it.
template <bool kNotes>
class StageNotes {
  public:
    DEEP_EP_DEVICE explicit StageNotes(u64*) {}
    DEEP_EP_DEVICE void ended(Stage) const {}
};

template <>
class StageNotes<true> {
  public:
    // `launch`: [blocks, warps, kStages] of this launch; null: nothing is noted.
    DEEP_EP_DEVICE explicit StageNotes(u64* launch)
        : times_(launch == nullptr ? nullptr
                                   : launch + (u64{blockIdx.x} * device::warps() + device::warp()) * kStages) {
        ended(Stage::kBegin);
    }
    // A warp. The host reads it once the launch has ended.
    DEEP_EP_DEVICE void ended(Stage stage) const {
        if (times_ != nullptr && device::lane() == 0) times_[static_cast<u32>(stage)] = device::now_ns();
    }

  private:
    u64* const times_;
};

}  // namespace deep_ep
