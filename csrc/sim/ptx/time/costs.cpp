#include "sim/ptx/time/costs.h"

#include <algorithm>

namespace deep_ep::ptx {
namespace {

bool begins(std::string_view text, std::string_view prefix) { return text.substr(0, prefix.size()) == prefix; }
bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }
bool is_wide(std::string_view opcode) {
    const std::string_view type = opcode.substr(std::min(opcode.rfind('.'), opcode.size()));
    return type == ".u64" || type == ".s64" || type == ".b64";
}

FenceCost scope_of(std::string_view opcode) {
    return has(opcode, ".sys") ? FenceCost::kSystem : has(opcode, ".gpu") ? FenceCost::kDevice : FenceCost::kBlock;
}

Cost memory(std::string_view opcode) {
    Cost cost{1, 0};
    const bool is_atomic = begins(opcode, "atom");
    cost.has_result = is_atomic || begins(opcode, "ld");
    cost.acquires = has(opcode, ".acquire") || has(opcode, ".acq_rel");
    if (has(opcode, ".release") || has(opcode, ".acq_rel")) cost.fence = scope_of(opcode);
    // With a generic address, ptxas branches on the result of an atomic.
    cost.waits = is_atomic;
    if (begins(opcode, "ld.param")) cost = {0, 8};
    return cost;
}

// ptxas turns instructions of 64 bits into two, and removes moves and conversions of address spaces.
Cost arithmetic(std::string_view opcode) {
    if (begins(opcode, "mov") || begins(opcode, "cvta")) return {0, 0};
    if (begins(opcode, "div") || begins(opcode, "rem")) {
        if (has(opcode, "64")) return {110, 222};
        return {20, 60};
    }
    if (begins(opcode, "mul.wide") || begins(opcode, "mul.hi")) return {1, 6};
    if (is_wide(opcode) && (begins(opcode, "mul") || begins(opcode, "mad"))) return {4, 14};
    if (begins(opcode, "cvt")) {
        const bool is_float = has(opcode, "f32") || has(opcode, "e4m3");
        return is_float ? Cost{2, 14} : Cost{1, 5};
    }
    if (begins(opcode, "popc") || begins(opcode, "bfind") || begins(opcode, "brev") || begins(opcode, "clz")) {
        return {2, 16};
    }
    return is_wide(opcode) ? Cost{2, 7} : Cost{1, 5};
}

}  // namespace

Cost cost_of(std::string_view opcode) {
    const auto without_result = [](Cost cost) {
        cost.has_result = false;
        return cost;
    };
    if (begins(opcode, "ld") || begins(opcode, "st") || begins(opcode, "atom") || begins(opcode, "red")) {
        return memory(opcode);
    }
    if (begins(opcode, "fence.proxy")) {
        Cost cost = without_result({20, 0});
        if (has(opcode, "shared::cta")) cost.fence = FenceCost::kBlock;
        // Without a state space it becomes a fence of all memory at device scope.
        if (opcode == "fence.proxy.async") cost.fence = FenceCost::kDevice;
        return cost;
    }
    if (begins(opcode, "fence")) {
        Cost cost = without_result({1, 0});
        cost.fence = scope_of(opcode);
        return cost;
    }
    if (begins(opcode, "bra")) {
        Cost cost = without_result({1, 0});
        cost.is_branch = true;
        return cost;
    }
    if (begins(opcode, "call") || begins(opcode, "ret")) return without_result({20, 0});
    if (begins(opcode, "shfl")) return {1, 24};
    if (begins(opcode, "vote")) return {1, 12};
    if (begins(opcode, "bar.warp")) return without_result({2, 0});
    if (begins(opcode, "bar")) return {2, 0};
    if (begins(opcode, "cp.async.bulk.commit") || begins(opcode, "nanosleep")) return without_result({2, 0});
    if (begins(opcode, "cp.async") || begins(opcode, "mbarrier")) return without_result({20, 0});
    return arithmetic(opcode);
}

}  // namespace deep_ep::ptx
