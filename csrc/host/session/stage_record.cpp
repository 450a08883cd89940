#include "host/session/stage_record.h"

#include <algorithm>
#include <utility>

#include "kernels/common/stages.h"
#include "observe/clock.h"

namespace deep_ep::host {

void StageRecord::start(size_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const size_t room = bytes / sizeof(u64);
    if (room > room_) {
        times_ = std::static_pointer_cast<u64>(memory_.make_private(room * sizeof(u64)));
        room_ = room;
    }
    on_ = true;
    lost_ = 0;
}

u64* StageRecord::place(const char* kernel, unsigned blocks, unsigned warps) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!on_) return nullptr;
    const size_t count = size_t{blocks} * warps * kStages;
    if (count > room_ - used_) {
        ++lost_;
        return nullptr;
    }
    launches_.push_back({kernel, blocks, warps, observe::monotonic_ns(), std::vector<u64>(count)});
    used_ += count;
    return times_.get() + (used_ - count);
}

std::vector<StageRecord::Launch> StageRecord::take() {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::vector<u64> all(used_);
    if (used_ != 0) {
        memory_.read(all.data(), times_.get(), used_ * sizeof(u64));
        memory_.fill(times_.get(), 0, used_ * sizeof(u64));
    }
    auto next = all.cbegin();
    for (Launch& launch : launches_) {
        const auto end = next + static_cast<std::ptrdiff_t>(launch.ended_ns.size());
        std::copy(next, end, launch.ended_ns.begin());
        next = end;
    }
    used_ = 0;
    return std::exchange(launches_, {});
}

// Kernels still write there.
void StageRecord::drop() {
    const std::lock_guard<std::mutex> guard(mutex_);
    dropped_.push_back(std::exchange(times_, nullptr));
    lost_ += launches_.size();
    launches_.clear();
    room_ = used_ = 0;
}

}  // namespace deep_ep::host
