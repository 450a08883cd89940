// Branches, calls, and time.
#include <algorithm>

#include "cpu/executor/device_calls.h"
#include "ptx/handlers.h"
#include "ptx/lane.h"
#include "ptx/types.h"

namespace deep_ep::ptx {
namespace {

using Step = const Instruction&;

void branch(Lane& lane, Step step) { lane.jump(step.operands[0]); }
void call(Lane& lane, Step step) { lane.call(step); }
void leave(Lane& lane, Step) { lane.leave(); }

// Others have their turns meanwhile: a thread that polls lets the clock go on here. One that has polled for long sleeps
// longer each time, up to so many times what it asks for: a wait that lasts for seconds would take minutes else.
constexpr u32 kMaxLog2 = 17;

void sleep(Lane& lane, Step step) {
    const u64 until = cpu::now_ns() + (u64{lane.get<u32>(step.operands[0])} << std::min(lane.sleep(), kMaxLog2));
    cpu::wait_until([] { return false; }, "nanosleep", until, lane.site().file, lane.site().line);
}

const Handlers& handlers() {
    static const Handlers all{
        {"bra", branch}, {"bra.uni", branch}, {"call.uni", call},
        {"call", call},  {"ret", leave},      {"nanosleep.u32", sleep},
    };
    return all;
}

}  // namespace

Handler find_control(std::string_view opcode) { return look_up(handlers(), opcode); }

bool understand(std::string_view opcode, Instruction& instruction) {
    for (const auto find : {find_arithmetic, find_conversion, find_control, find_bulk}) {
        instruction.handler = find(opcode);
        if (instruction.handler != nullptr) return true;
    }
    return find_collective(opcode, instruction) || find_memory(opcode, instruction);
}

}  // namespace deep_ep::ptx
