// Collectives of a warp or a block: barriers, shuffles and votes.
#include "sim/executor/builtin_variables.h"
#include "sim/executor/device_calls.h"
#include "sim/ptx/handlers.h"
#include "sim/ptx/lane.h"
#include "sim/ptx/types.h"

namespace deep_ep::ptx {
namespace {

using Step = const Instruction&;
using cpu::Collective;

// Numbered above the block's barriers: each mask of each warp has its own.
u64 barrier_of_warp(u32 mask) { return (u64{1} << 63) | static_cast<u64>(threadIdx.x / 32) << 32 | mask; }

void synchronize_warp(Lane& lane, Step step) {
    const u32 mask = lane.get<u32>(step.operands[0]);
    lane.sync(barrier_of_warp(mask), [&] { return cpu::collective(Collective::kSyncWarp, mask, 0, 0, lane.site()); });
}

// d|p, value, b, c, mask. The source lane follows PTX ISA, "shfl.sync".
enum class Shuffle : u8 { kIndex, kUp, kDown, kButterfly };

template <Shuffle kMode>
void shuffle(Lane& lane, Step step) {
    const Operand* const given = step.operands + (step.count - 4);
    const u32 self = threadIdx.x % 32, b = lane.get<u32>(given[1]) & 31, c = lane.get<u32>(given[2]);
    const u32 segment = c >> 8 & 31, clamp = c & 31;
    const u32 least = self & segment, most = least | (clamp & ~segment);
    u32 source = 0;
    bool inside = false;
    switch (kMode) {
        case Shuffle::kIndex:
            source = least | (b & ~segment);
            inside = source <= most;
            break;
        case Shuffle::kUp:
            source = self - b;
            inside = static_cast<i32>(source) >= static_cast<i32>(most);
            break;
        case Shuffle::kDown:
            source = self + b;
            inside = source <= most;
            break;
        case Shuffle::kButterfly:
            source = self ^ b;
            inside = source <= most;
            break;
    }
    const u32 mask = lane.get<u32>(given[3]), value = lane.get<u32>(given[0]);
    const u64 got = lane.meet(barrier_of_warp(mask), [&] {
        return cpu::collective(Collective::kShuffle, mask, value, inside ? source : self, lane.site());
    });
    lane.set<u32>(step.operands[0], static_cast<u32>(got));
    if (step.count == 6) lane.set<bool>(step.operands[1], inside);
}

template <Collective kVote, class T>
void vote(Lane& lane, Step step) {
    const bool mine = lane.holds(step.operands[1]);
    const u32 mask = lane.get<u32>(step.operands[2]);
    lane.set<T>(step.operands[0], static_cast<T>(lane.meet(barrier_of_warp(mask), [&] {
                    return cpu::collective(kVote, mask, mine, 0, lane.site());
                })));
}

void synchronize_block(Lane& lane, Step step) {
    lane.align(step);
    const u32 threads = step.count > 1 ? lane.get<u32>(step.operands[1]) : 0;
    const u32 barrier = lane.get<u32>(step.operands[0]);
    lane.sync(barrier, [&] { return cpu::barrier(barrier, threads, false, lane.site()); });
}

// all, barrier[, threads], mine
template <bool kAligned>
void any_of_block(Lane& lane, Step step) {
    if (kAligned) lane.align(step);
    const u32 threads = step.count > 3 ? lane.get<u32>(step.operands[2]) : 0;
    const bool mine = lane.holds(step.operands[step.count - 1]);
    const u32 barrier = lane.get<u32>(step.operands[1]);
    lane.set<bool>(step.operands[0],
                   lane.sync(barrier, [&] { return cpu::barrier(barrier, threads, mine, lane.site()); }));
}

const Handlers& collective_handlers() {
    static const Handlers all{
        {"bar.warp.sync", synchronize_warp},
        {"shfl.sync.idx.b32", shuffle<Shuffle::kIndex>},
        {"shfl.sync.up.b32", shuffle<Shuffle::kUp>},
        {"shfl.sync.down.b32", shuffle<Shuffle::kDown>},
        {"shfl.sync.bfly.b32", shuffle<Shuffle::kButterfly>},
        {"vote.sync.ballot.b32", vote<Collective::kBallot, u32>},
        {"vote.sync.any.pred", vote<Collective::kAny, bool>},
        {"vote.sync.all.pred", vote<Collective::kAll, bool>},
        {"bar.sync", synchronize_block},
        {"bar.red.or.pred", any_of_block<true>},
        {"barrier.cta.red.or.pred", any_of_block<false>},
    };
    return all;
}

}  // namespace

bool find_collective(std::string_view opcode, Instruction& instruction) {
    instruction.handler = look_up(collective_handlers(), opcode);
    const bool of_block = instruction.handler == synchronize_block || instruction.handler == any_of_block<true> ||
                          instruction.handler == any_of_block<false>;
    instruction.meets = instruction.handler == nullptr ? Meets::kNone : of_block ? Meets::kBlock : Meets::kWarp;
    return instruction.handler != nullptr;
}

}  // namespace deep_ep::ptx
