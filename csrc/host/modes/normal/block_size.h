// The number of ranks for which the shared memory of a thread block suffices.
#pragma once

#include <algorithm>

#include "host/session/runtime.h"

namespace deep_ep::host {

// Returns the largest number of ranks for which all of these kernels can be launched: at most this Buffer's, in whole
// nodes.
template <class... Kernels>
uint32_t max_ranks_of(const Runtime& runtime, uint32_t experts, uint32_t per_node) {
    const Launcher& launcher = runtime.launcher();
    auto ranks = static_cast<uint32_t>(runtime.options().ranks);
    const auto needed = [&] {
        const BlockSizes block{ranks, experts, 0, launcher.warps(), launcher.copies_bytes(), per_node};
        return std::max({Kernels::shared_bytes(fitting<Kernels>(launcher, block))...});
    };
    while (ranks > 0 && needed() > launcher.max_shared_bytes()) ranks -= per_node;
    return ranks;
}

}  // namespace deep_ep::host
