#include "sim/ptx/block.h"

namespace deep_ep::ptx {

std::unique_ptr<ThreadCount> Block::count_of(u32 thread) {
    if (kernel_ == nullptr) return nullptr;
    const u32 warp = thread / WarpCount::kLanes, lane = thread % WarpCount::kLanes;
    const u32 lanes = std::min(WarpCount::kLanes, all_threads_ - warp * WarpCount::kLanes);
    WarpCount* const of_warp =
        !counts_->executions() ? nullptr : &warps_.try_emplace(warp, kernel_->count, lanes).first->second;
    return std::make_unique<ThreadCount>(*counts_, place.launch, *kernel_, of_warp, lane, time ? &*time : nullptr);
}

}  // namespace deep_ep::ptx
