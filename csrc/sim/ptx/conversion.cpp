// Moves, and conversions between types and between state spaces.
#include "device/fp8_scales.h"
#include "sim/ptx/handlers.h"
#include "sim/ptx/lane.h"
#include "sim/ptx/types.h"

namespace deep_ep::ptx {
namespace {

using Step = const Instruction&;

template <class T>
void move(Lane& lane, Step step) {
    lane.set<T>(step.operands[0], lane.get<T>(step.operands[1]));
}

// Moves a 64-bit word; either side may be its two halves in braces.
void move_or_split(Lane& lane, Step step) {
    if (step.count == 2) {
        move<u64>(lane, step);
    } else if (step.vector == 2) {
        const u64 value = lane.get<u64>(step.operands[2]);
        lane.set<u32>(step.operands[0], static_cast<u32>(value));
        lane.set<u32>(step.operands[1], static_cast<u32>(value >> 32));
    } else {
        const u64 high = lane.get<u32>(step.operands[2]);
        lane.set<u64>(step.operands[0], high << 32 | lane.get<u32>(step.operands[1]));
    }
}

template <class To, class From>
void convert(Lane& lane, Step step) {
    lane.set<To>(step.operands[0], static_cast<To>(lane.get<From>(step.operands[1])));
}

// The first source operand becomes the upper half.
void to_bf16_pair(Lane& lane, Step step) {
    const auto bits = [&](int operand) -> u32 { return float_to_bf16(lane.get<f32>(step.operands[operand])); };
    lane.set<u32>(step.operands[0], bits(1) << 16 | bits(2));
}

void to_e4m3_pair(Lane& lane, Step step) {
    const auto bits = [&](int operand) -> u32 { return float_to_e4m3(lane.get<f32>(step.operands[operand])); };
    lane.set<u16>(step.operands[0], static_cast<u16>(bits(1) << 8 | bits(2)));
}

template <Space kSpace>
void to_generic(Lane& lane, Step step) {
    lane.set<u64>(step.operands[0], lane.generic(lane.get<u64>(step.operands[1]), kSpace));
}
template <Space kSpace>
void from_generic(Lane& lane, Step step) {
    lane.set<u64>(step.operands[0], lane.get<u64>(step.operands[1]) - lane.generic(0, kSpace));
}

const Handlers& conversion_handlers() {
    static const Handlers all{
        {"mov.pred", move<bool>},
        {"mov.u16", move<u16>},
        {"mov.b16", move<u16>},
        {"mov.u32", move<u32>},
        {"mov.b32", move<u32>},
        {"mov.f32", move<f32>},
        {"mov.u64", move<u64>},
        {"mov.b64", move_or_split},
        {"cvt.u16.u32", convert<u16, u32>},
        {"cvt.u16.u64", convert<u16, u64>},
        {"cvt.u32.u16", convert<u32, u16>},
        {"cvt.u32.u64", convert<u32, u64>},
        {"cvt.u64.u16", convert<u64, u16>},
        {"cvt.u64.u32", convert<u64, u32>},
        {"cvt.s32.s8", convert<i32, i8>},
        {"cvt.s32.s16", convert<i32, i16>},
        {"cvt.s64.s32", convert<i64, i32>},
        {"cvt.rn.f32.u32", convert<f32, u32>},
        {"cvt.rn.f32.s32", convert<f32, i32>},
        {"cvt.rn.bf16x2.f32", to_bf16_pair},
        {"cvt.rn.satfinite.e4m3x2.f32", to_e4m3_pair},
        {"cvta.shared.u64", to_generic<Space::kShared>},
        {"cvta.local.u64", to_generic<Space::kLocal>},
        {"cvta.param.u64", to_generic<Space::kParam>},
        {"cvta.to.shared.u64", from_generic<Space::kShared>},
        {"cvta.to.local.u64", from_generic<Space::kLocal>},
        {"cvta.to.global.u64", from_generic<Space::kGlobal>},
    };
    return all;
}

}  // namespace

Handler find_conversion(std::string_view opcode) { return look_up(conversion_handlers(), opcode); }

}  // namespace deep_ep::ptx
