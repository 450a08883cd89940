// Arithmetic, logic, comparisons and selections.
#include <bit>
#include <cmath>

#include "sim/ptx/handlers.h"
#include "sim/ptx/lane.h"
#include "sim/ptx/types.h"

namespace deep_ep::ptx {
namespace {

using Step = const Instruction&;

// --- operations on values of one type ------------------------------------------------------------

// Integers wrap around, so arithmetic on them uses the widest unsigned type.
template <class T>
using Wide = std::conditional_t<std::is_floating_point_v<T>, T, u64>;

struct Add {
    template <class T>
    static T of(T a, T b) {
        return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b));
    }
};
struct Subtract {
    template <class T>
    static T of(T a, T b) {
        return static_cast<T>(static_cast<Wide<T>>(a) - static_cast<Wide<T>>(b));
    }
};
struct Multiply {
    template <class T>
    static T of(T a, T b) {
        return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b));
    }
};
struct Minimum {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
        return a < b ? a : b;
    }
};
struct Maximum {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
        return a < b ? b : a;
    }
};
struct And {
    template <class T>
    static T of(T a, T b) {
        return static_cast<T>(a & b);
    }
};
struct Or {
    template <class T>
    static T of(T a, T b) {
        return static_cast<T>(a | b);
    }
};
struct ExclusiveOr {
    template <class T>
    static T of(T a, T b) {
        return static_cast<T>(a ^ b);
    }
};

template <class Operation, class T>
void binary(Lane& lane, Step step) {
    lane.set<T>(step.operands[0],
                Operation::template of<T>(lane.get<T>(step.operands[1]), lane.get<T>(step.operands[2])));
}

// PTX leaves the result of an integer division by zero unspecified.
template <class T>
void divide(Lane& lane, Step step) {
    const T by = lane.get<T>(step.operands[2]);
    if (!std::is_floating_point_v<T> && by == 0) lane.fail("it divides by 0");
    lane.set<T>(step.operands[0], static_cast<T>(lane.get<T>(step.operands[1]) / by));
}
template <class T>
void remainder(Lane& lane, Step step) {
    const T by = lane.get<T>(step.operands[2]);
    if (by == 0) lane.fail("it divides by 0");
    lane.set<T>(step.operands[0], static_cast<T>(lane.get<T>(step.operands[1]) % by));
}

template <class T, class Product>
void multiply_wide(Lane& lane, Step step) {
    lane.set<Product>(step.operands[0], static_cast<Product>(static_cast<Product>(lane.get<T>(step.operands[1])) *
                                                             static_cast<Product>(lane.get<T>(step.operands[2]))));
}
void multiply_high(Lane& lane, Step step) {
    const u64 product = u64{lane.get<u32>(step.operands[1])} * lane.get<u32>(step.operands[2]);
    lane.set<u32>(step.operands[0], static_cast<u32>(product >> 32));
}
template <class T>
void multiply_and_add(Lane& lane, Step step) {
    const T product = Multiply::of<T>(lane.get<T>(step.operands[1]), lane.get<T>(step.operands[2]));
    lane.set<T>(step.operands[0], Add::of<T>(product, lane.get<T>(step.operands[3])));
}

template <class T>
void negate(Lane& lane, Step step) {
    lane.set<T>(step.operands[0], Subtract::of<T>(T{0}, lane.get<T>(step.operands[1])));
}
template <class T>
void invert(Lane& lane, Step step) {
    const T value = lane.get<T>(step.operands[1]);
    if constexpr (std::is_same_v<T, bool>) {
        lane.set<bool>(step.operands[0], !value);
    } else {
        lane.set<T>(step.operands[0], static_cast<T>(~value));
    }
}

// Shifts by at least the width give zeros or copies of the sign bit.
template <class T>
void shift_left(Lane& lane, Step step) {
    const u32 by = lane.get<u32>(step.operands[2]);
    lane.set<T>(step.operands[0], by >= 8 * sizeof(T) ? T{0} : static_cast<T>(lane.get<T>(step.operands[1]) << by));
}
template <class T>
void shift_right(Lane& lane, Step step) {
    const T value = lane.get<T>(step.operands[1]);
    const u32 by = lane.get<u32>(step.operands[2]);
    if (by < 8 * sizeof(T)) {
        lane.set<T>(step.operands[0], static_cast<T>(value >> by));
    } else {
        lane.set<T>(step.operands[0], std::is_signed_v<T> && value < 0 ? static_cast<T>(-1) : T{0});
    }
}

// --- bits ----------------------------------------------------------------------------------------

template <class T>
void insert_bits(Lane& lane, Step step) {
    constexpr u32 kBits = 8 * sizeof(T);
    const T from = lane.get<T>(step.operands[1]), into = lane.get<T>(step.operands[2]);
    const u32 at = lane.get<u32>(step.operands[3]) & 0xff, count = lane.get<u32>(step.operands[4]) & 0xff;
    T mask = count >= kBits ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << count) - 1);
    mask = at >= kBits ? T{0} : static_cast<T>(mask << at);
    const T moved = at >= kBits ? T{0} : static_cast<T>(from << at);
    lane.set<T>(step.operands[0], static_cast<T>((into & ~mask) | (moved & mask)));
}

// The left shift that moves the highest set bit to the most significant position.
void find_bit_as_shift(Lane& lane, Step step) {
    const u32 value = lane.get<u32>(step.operands[1]);
    lane.set<u32>(step.operands[0], value == 0 ? ~0u : static_cast<u32>(std::countl_zero(value)));
}
void reverse_bits(Lane& lane, Step step) {
    u32 value = lane.get<u32>(step.operands[1]), reversed = 0;
    for (u32 i = 0; i < 32; ++i, value >>= 1) reversed = reversed << 1 | (value & 1);
    lane.set<u32>(step.operands[0], reversed);
}
void count_bits(Lane& lane, Step step) {
    lane.set<u32>(step.operands[0], static_cast<u32>(std::popcount(lane.get<u32>(step.operands[1]))));
}

// Selects four bytes out of eight. Each hex digit of the selector names a byte; with its highest bit set it stands for
// that byte's sign, replicated.
void permute_bytes(Lane& lane, Step step) {
    const u64 bytes = static_cast<u64>(lane.get<u32>(step.operands[2])) << 32 | lane.get<u32>(step.operands[1]);
    const u32 selector = lane.get<u32>(step.operands[3]);
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 digit = selector >> (4 * i) & 15;
        u32 byte = static_cast<u32>(bytes >> (8 * (digit & 7))) & 0xff;
        if ((digit & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    lane.set<u32>(step.operands[0], result);
}

// --- comparisons ---------------------------------------------------------------------------------

struct Equal {
    template <class T>
    static bool of(T a, T b) {
        return a == b;
    }
};
struct Unequal {
    // An unordered comparison is false: setp.ne is not setp.neu.
    template <class T>
    static bool of(T a, T b) {
        return a < b || a > b;
    }
};
struct Less {
    template <class T>
    static bool of(T a, T b) {
        return a < b;
    }
};
struct LessOrEqual {
    template <class T>
    static bool of(T a, T b) {
        return a <= b;
    }
};
struct Greater {
    template <class T>
    static bool of(T a, T b) {
        return a > b;
    }
};
struct GreaterOrEqual {
    template <class T>
    static bool of(T a, T b) {
        return a >= b;
    }
};

template <class Comparison, class T>
void compare(Lane& lane, Step step) {
    lane.set<bool>(step.operands[0],
                   Comparison::template of<T>(lane.get<T>(step.operands[1]), lane.get<T>(step.operands[2])));
}

template <class T>
void select(Lane& lane, Step step) {
    lane.set<T>(step.operands[0], lane.get<T>(step.operands[lane.holds(step.operands[3]) ? 1 : 2]));
}

// --- by name -------------------------------------------------------------------------------------

Handlers made;

template <class Operation, class... Ts>
void each_binary(const std::string& name) {
    ((made[name + "." + TypeName<Ts>::kName] = binary<Operation, Ts>), ...);
}
// Bitwise operations are untyped: .b16, .b32 and .b64.
template <class Operation>
void bitwise(const std::string& name) {
    made[name + ".pred"] = binary<Operation, bool>;
    made[name + ".b16"] = binary<Operation, u16>;
    made[name + ".b32"] = binary<Operation, u32>;
    made[name + ".b64"] = binary<Operation, u64>;
}
template <class Comparison>
void comparisons(const std::string& name) {
    made[name + ".f32"] = compare<Comparison, f32>;
    made[name + ".u16"] = compare<Comparison, u16>;
    made[name + ".u32"] = compare<Comparison, u32>;
    made[name + ".u64"] = compare<Comparison, u64>;
    made[name + ".s16"] = compare<Comparison, i16>;
    made[name + ".s32"] = compare<Comparison, i32>;
    made[name + ".s64"] = compare<Comparison, i64>;
}
template <class T>
void selections(const std::string& bits) {
    made["selp.b" + bits] = made["selp.u" + bits] = select<T>;
}

const Handlers& arithmetic_handlers() {
    static const Handlers all = [] {
        each_binary<Add, u16, u32, u64, i16, i32, i64, f32>("add");
        each_binary<Subtract, u16, u32, u64, i16, i32, i64, f32>("sub");
        each_binary<Multiply, u16, u32, u64, i16, i32, i64>("mul.lo");
        each_binary<Minimum, u32, u64, i32, i64, f32>("min");
        each_binary<Maximum, u32, u64, i32, i64, f32>("max");
        made["mul.f32"] = made["mul.rn.f32"] = binary<Multiply, f32>;
        made["add.rn.f32"] = binary<Add, f32>;
        made["sub.rn.f32"] = binary<Subtract, f32>;
        made["mul.wide.u16"] = multiply_wide<u16, u32>;
        made["mul.wide.s16"] = multiply_wide<i16, i32>;
        made["mul.wide.u32"] = multiply_wide<u32, u64>;
        made["mul.wide.s32"] = multiply_wide<i32, i64>;
        made["mul.hi.u32"] = multiply_high;
        made["mad.lo.s32"] = made["mad.lo.u32"] = multiply_and_add<u32>;
        made["mad.lo.s64"] = made["mad.lo.u64"] = multiply_and_add<u64>;
        made["div.u32"] = divide<u32>;
        made["div.u64"] = divide<u64>;
        made["div.rn.f32"] = divide<f32>;
        made["rem.u32"] = remainder<u32>;
        made["rem.u64"] = remainder<u64>;
        made["neg.s32"] = negate<i32>;
        made["neg.s64"] = negate<i64>;
        made["not.pred"] = invert<bool>;
        made["not.b16"] = invert<u16>;
        made["not.b32"] = invert<u32>;
        made["not.b64"] = invert<u64>;
        bitwise<And>("and");
        bitwise<Or>("or");
        bitwise<ExclusiveOr>("xor");
        made["shl.b16"] = shift_left<u16>;
        made["shl.b32"] = shift_left<u32>;
        made["shl.b64"] = shift_left<u64>;
        made["shr.u16"] = shift_right<u16>;
        made["shr.u32"] = shift_right<u32>;
        made["shr.u64"] = shift_right<u64>;
        made["shr.s32"] = shift_right<i32>;
        made["shr.s64"] = shift_right<i64>;
        made["bfi.b32"] = insert_bits<u32>;
        made["bfi.b64"] = insert_bits<u64>;
        made["bfind.shiftamt.u32"] = find_bit_as_shift;
        made["brev.b32"] = reverse_bits;
        made["popc.b32"] = count_bits;
        made["prmt.b32"] = permute_bytes;
        comparisons<Equal>("setp.eq");
        comparisons<Unequal>("setp.ne");
        comparisons<Less>("setp.lt");
        comparisons<LessOrEqual>("setp.le");
        comparisons<Greater>("setp.gt");
        comparisons<GreaterOrEqual>("setp.ge");
        made["setp.eq.b16"] = compare<Equal, u16>;
        made["setp.eq.b32"] = compare<Equal, u32>;
        made["setp.eq.b64"] = compare<Equal, u64>;
        made["setp.ne.b16"] = compare<Unequal, u16>;
        made["setp.ne.b32"] = compare<Unequal, u32>;
        made["setp.ne.b64"] = compare<Unequal, u64>;
        selections<u16>("16");
        selections<u32>("32");
        selections<u64>("64");
        made["selp.f32"] = select<f32>;
        return std::move(made);
    }();
    return all;
}

}  // namespace

Handler find_arithmetic(std::string_view opcode) { return look_up(arithmetic_handlers(), opcode); }

}  // namespace deep_ep::ptx
