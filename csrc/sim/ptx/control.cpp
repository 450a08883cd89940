// Branches, calls and nanosleep.
#include <algorithm>

#include "sim/executor/device_calls.h"
#include "sim/ptx/handlers.h"
#include "sim/ptx/lane.h"
#include "sim/ptx/types.h"

namespace deep_ep::ptx {
namespace {

using Step = const Instruction&;

void branch(Lane& lane, Step step) { lane.jump(step.operands[0]); }
void call(Lane& lane, Step step) { lane.call(step); }
void leave(Lane& lane, Step) { lane.leave(); }

// A sleeping thread lets other threads run and the clock advance. One that keeps polling sleeps twice as long each
// time, up to 2^kMaxLog2 times what it asks for: otherwise a wait of seconds would take minutes to interpret.
constexpr u32 kMaxLog2 = 17;

void sleep(Lane& lane, Step step) {
    if (LaneTime* const time = lane.time()) {
        time->sleep(lane.get<u32>(step.operands[0]));
        return lane.turn();
    }
    const u64 until = cpu::now_ns() + (u64{lane.get<u32>(step.operands[0])} << std::min(lane.sleep(), kMaxLog2));
    cpu::wait_until([] { return false; }, "nanosleep", until, lane.site().file, lane.site().line);
}

const Handlers& control_handlers() {
    static const Handlers all{
        {"bra", branch}, {"bra.uni", branch}, {"call.uni", call},
        {"call", call},  {"ret", leave},      {"nanosleep.u32", sleep},
    };
    return all;
}

}  // namespace

Handler find_control(std::string_view opcode) { return look_up(control_handlers(), opcode); }

bool understand(std::string_view opcode, Instruction& instruction) {
    for (const auto find : {find_arithmetic, find_conversion, find_control, find_bulk}) {
        instruction.handler = find(opcode);
        if (instruction.handler != nullptr) return true;
    }
    return find_collective(opcode, instruction) || find_memory(opcode, instruction);
}

}  // namespace deep_ep::ptx
