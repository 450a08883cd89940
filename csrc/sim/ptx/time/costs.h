// What the machine code of a PTX instruction costs a warp on an SM, in cycles.
#pragma once

#include <string_view>

#include "wire/types.h"

namespace deep_ep::ptx {

// A fence waits until all earlier accesses of the thread are performed where the threads of the scope see them.
enum class FenceCost : u8 { kNone, kBlock, kDevice, kSystem };

struct Cost {
    float issue;    // until the warp can issue its next instruction
    float latency;  // until another instruction can use the result; of loads only what precedes the memory's latency
    FenceCost fence = FenceCost::kNone;  // before the instruction itself
    bool acquires = false;               // what follows waits for the loaded value, and lines in the L1 are dropped
    bool waits = false;                  // the thread waits for the result even if it uses none
    bool is_branch = false;
    bool has_result = true;  // its first operand
};

Cost cost_of(std::string_view opcode);

// Latencies and rates, in cycles of 1.9 GHz and bytes per cycle. Those of memories are microbenchmarks of H100s, whose
// SMs H200s share.
namespace machine {
constexpr double kCyclesPerNs = 1.9;
constexpr double kShared = 30, kL1 = 38, kL2 = 273, kHbm = 850, kPeer = 1800;
constexpr double kBarrier = 30, kWarpBarrier = 6, kArrival = 25;
constexpr double kBranchTaken = 9, kGuard = 7;  // from a predicate to a guarded instruction
constexpr double kBlockFence = 40, kDeviceFence = 500, kSystemFence = 900;
// Memory across the bus, and a NIC: from a doorbell to the first byte, and from the last byte to its word at the peer.
constexpr double kBus = 2800, kNicStart = 1500, kNicWay = 2300;
constexpr double kBulkBytesPerCycle = 64, kBulkStart = 60;
constexpr u64 kL1Bytes = u64{128} << 10, kL2Bytes = u64{50} << 20, kLine = 64;
}  // namespace machine

}  // namespace deep_ep::ptx
