#include "sim/ptx/kernel.h"

#include <atomic>
#include <cstring>
#include <map>

#include "sim/executor/builtin_variables.h"
#include "sim/executor/device_calls.h"
#include "sim/ptx/block.h"
#include "sim/ptx/lane.h"

namespace deep_ep::ptx {
namespace {

constexpr size_t kMaxText = 512;

// Number of the launch, and of the block in its grid.
using BlockPlace = std::tuple<u64, u32>;

struct RunningBlock {
    RunningBlock(u8* shared, const LaunchHead& head, u64 number, std::shared_ptr<Counts> counts, Counts::Kernel* kernel)
        : block(shared, head.shared_bytes, blockDim.x,
                {head.rank, head.row, head.number, u64{blockDim.x} * gridDim.x, number}, std::move(counts), kernel) {}

    Block block;
    std::map<u32, Lane> lanes;  // here, not on a fiber's stack, which may never be unwound
};

// The blocks that are running. Threads of all blocks take turns on one host thread.
std::map<BlockPlace, std::unique_ptr<RunningBlock>>& running() {
    static std::map<BlockPlace, std::unique_ptr<RunningBlock>> blocks;
    return blocks;
}

u64 blocks = 0;  // created so far

void enter(const void* args) {
    LaunchHead head;
    std::memcpy(&head, args, sizeof(head));
    const BlockPlace place{head.number, blockIdx.x};
    std::unique_ptr<RunningBlock>& here = running()[place];
    if (here == nullptr) {
        auto* const shared = static_cast<u8*>(cpu::dynamic_shared());
        std::shared_ptr<Counts> counts = Counts::active();
        Counts::Kernel* const kernel = counts ? &counts->of(head.image->module(), *head.entry) : nullptr;
        if (kernel != nullptr) {
            kernel->count.launches += blockIdx.x == 0;
            ++kernel->count.blocks;
            if (counts->times()) counts->begin(*kernel, head.number, head.rank, gridDim.x, head.not_before);
        }
        here = std::make_unique<RunningBlock>(shared, head, ++blocks, std::move(counts), kernel);
    }
    RunningBlock& mine = *here;
    const u32 thread = threadIdx.x;
    const void* const own = static_cast<const u8*>(args) + sizeof(head);
    // cpu::refuse suspends the thread for good, so it must not be called while an exception is being handled.
    char why[kMaxText] = "";
    try {
        mine.lanes.try_emplace(thread, *head.image, *head.entry, mine.block, own).first->second.run();
    } catch (const PtxError& error) {
        std::strncpy(why, error.what(), kMaxText - 1);
    }
    if (why[0] != 0) {
        running().clear();  // no thread of any kernel runs again
        cpu::refuse(why, {head.entry->name.c_str(), 0});
    }
    mine.lanes.erase(thread);
    if (--mine.block.threads != 0) return;
    const bool has_loads = mine.block.has_loads();
    running().erase(place);
    if (has_loads) {
        running().clear();
        cpu::refuse("a block ends before bulk copies into its shared memory have been waited for",
                    {head.entry->name.c_str(), 0});
    }
}

std::atomic<u64> launches{0};

}  // namespace

void prepare(cpu::Launch& launch, std::string& held, const Image& image, const std::string& symbol,
             const LaunchPlace& place) {
    const auto counts = Counts::active();
    const LaunchHead head{&image,
                          &image.module().function(symbol),
                          image.static_shared_bytes() + launch.shared_bytes,
                          ++launches,
                          place.rank,
                          place.row,
                          counts ? counts->latest() : 0.0};
    held.assign(reinterpret_cast<const char*>(&head), sizeof(head));
    held.append(static_cast<const char*>(launch.args), launch.args_bytes);
    launch.entry = enter;
    launch.shared_bytes = head.shared_bytes;
    launch.args = held.data();
    launch.args_bytes = held.size();
}

}  // namespace deep_ep::ptx
