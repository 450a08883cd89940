// Loads, stores and atomics.
#include <map>

#include "sim/ptx/handlers.h"
#include "sim/ptx/lane.h"
#include "sim/ptx/types.h"

namespace deep_ep::ptx {
namespace {

using Step = const Instruction&;
using Access = Lane::Access;

// --- plain accesses ------------------------------------------------------------------------------

template <class T>
void load(Lane& lane, Step step) {
    const u32 count = step.vector;
    const u8* const from = lane.reach(step.operands[count], step.space, count * sizeof(T), Access::kRead);
    T values[4];
    std::memcpy(values, from, count * sizeof(T));
    for (u32 i = 0; i < count; ++i) lane.set<T>(step.operands[i], values[i]);
    lane.count_load(from, count * sizeof(T));
}

template <class T>
void store(Lane& lane, Step step) {
    const u32 count = step.vector;
    T values[4];
    for (u32 i = 0; i < count; ++i) values[i] = lane.get<T>(step.operands[1 + i]);
    std::memcpy(lane.reach(step.operands[0], step.space, count * sizeof(T), Access::kWrite), values, count * sizeof(T));
}

// --- strong accesses --------------------------------------------------------------------------------

template <int kOrder>
Lane::Strong strong_of(Step step) {
    return {step.scope, kOrder == __ATOMIC_ACQUIRE || kOrder == __ATOMIC_ACQ_REL,
            kOrder == __ATOMIC_RELEASE || kOrder == __ATOMIC_ACQ_REL};
}

template <class T>
T* word(Lane& lane, Step step, u32 operand, Access access) {
    lane.turn();
    u8* const memory = lane.locate(step.operands[operand], step.space, sizeof(T), access);
    lane.count_access(memory, sizeof(T), access);
    return reinterpret_cast<T*>(memory);
}

// The elements of a vector are loaded one by one, in no particular order.
template <class T, int kOrder>
void strong_load(Lane& lane, Step step) {
    const u32 count = step.vector;
    lane.turn();
    const u8* const from = lane.locate(step.operands[count], step.space, count * sizeof(T), Access::kRead);
    lane.count_access(from, count * sizeof(T), Access::kRead);
    for (u32 i = 0; i < count; ++i) {
        const T* const element = reinterpret_cast<const T*>(from) + i;
        const auto held = lane.hold();
        const T newest = __atomic_load_n(element, kOrder);
        lane.set<T>(step.operands[i], lane.load_word<T>(element, newest, strong_of<kOrder>(step), true));
    }
}

template <class T, int kOrder>
void strong_store(Lane& lane, Step step) {
    if (step.vector != 1) lane.fail("a strong store of several elements is not supported");
    const T value = lane.get<T>(step.operands[1]);
    T* const target = word<T>(lane, step, 0, Access::kWrite);
    lane.wake();
    const auto held = lane.hold();
    lane.store_word<T>(target, __atomic_load_n(target, __ATOMIC_RELAXED), value, strong_of<kOrder>(step), false);
    __atomic_store_n(target, value, kOrder);
}

// Notes the value that an atomic has read and the one that it has stored.
template <class T, int kOrder>
void updated(Lane& lane, Step step, const T* target, T before, T after) {
    lane.load_word<T>(target, before, strong_of<kOrder>(step), false);
    lane.store_word<T>(target, before, after, strong_of<kOrder>(step), true);
    lane.set<T>(step.operands[0], before);
}

template <class T, int kOrder>
void atomic_add(Lane& lane, Step step) {
    const T value = lane.get<T>(step.operands[2]);
    T* const target = word<T>(lane, step, 1, Access::kUpdate);
    const auto held = lane.hold();
    const T before = __atomic_fetch_add(target, value, kOrder);
    updated<T, kOrder>(lane, step, target, before, static_cast<T>(before + value));
}
// A reduction: an atomic without a result.
template <class T, int kOrder>
void reduce_add(Lane& lane, Step step) {
    const T value = lane.get<T>(step.operands[1]);
    T* const target = word<T>(lane, step, 0, Access::kUpdate);
    const auto held = lane.hold();
    const T before = __atomic_fetch_add(target, value, kOrder);
    lane.load_word<T>(target, before, strong_of<kOrder>(step), false);
    lane.store_word<T>(target, before, static_cast<T>(before + value), strong_of<kOrder>(step), true);
}
template <class T, int kOrder>
void atomic_exchange(Lane& lane, Step step) {
    const T value = lane.get<T>(step.operands[2]);
    T* const target = word<T>(lane, step, 1, Access::kUpdate);
    const auto held = lane.hold();
    updated<T, kOrder>(lane, step, target, __atomic_exchange_n(target, value, kOrder), value);
}
template <class T, int kOrder>
void atomic_compare(Lane& lane, Step step) {
    T expected = lane.get<T>(step.operands[2]);
    const T value = lane.get<T>(step.operands[3]);
    T* const target = word<T>(lane, step, 1, Access::kUpdate);
    const Lane::Strong strong = strong_of<kOrder>(step);
    constexpr int kFailed =
        kOrder == __ATOMIC_ACQUIRE || kOrder == __ATOMIC_ACQ_REL ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;
    const auto held = lane.hold();
    if (__atomic_compare_exchange_n(target, &expected, value, false, kOrder, kFailed)) {
        updated<T, kOrder>(lane, step, target, expected, value);
    } else {
        lane.load_word<T>(target, expected, strong, false);
        lane.set<T>(step.operands[0], expected);
    }
}

void fence(Lane& lane, Step step) { lane.fence(step.scope); }

// --- by name ----------------------------------------------------------------------------------------

enum class Ordering : u8 { kWeak, kRelaxed, kAcquire, kRelease, kAcqRel };

struct Opcode {
    std::string_view name, operation, type;
    Ordering order = Ordering::kWeak;
};

const std::map<std::string_view, Space> kSpaces{
    {"global", Space::kGlobal}, {"shared", Space::kShared}, {"shared::cta", Space::kShared},
    {"local", Space::kLocal},   {"param", Space::kParam},   {"const", Space::kConst},
};
// Volatile accesses are relaxed accesses at system scope (PTX ISA, "Volatile operation").
const std::map<std::string_view, Ordering> kOrders{
    {"weak", Ordering::kWeak},       {"volatile", Ordering::kRelaxed}, {"relaxed", Ordering::kRelaxed},
    {"acquire", Ordering::kAcquire}, {"release", Ordering::kRelease},  {"acq_rel", Ordering::kAcqRel},
};

const std::map<std::string_view, Scope> kScopes{
    {"cta", Scope::kBlock}, {"gpu", Scope::kDevice}, {"sys", Scope::kSystem}};

// False: it has an unknown modifier.
bool take_apart(std::string_view text, Opcode& opcode, Instruction& instruction) {
    bool known = true;
    for (bool first = true; !text.empty(); first = false) {
        const size_t end = std::min(text.find('.'), text.size());
        const std::string_view part = text.substr(0, end);
        text.remove_prefix(std::min(end + 1, text.size()));
        if (first) {
            opcode.name = part;
        } else if (const auto space = kSpaces.find(part); space != kSpaces.end()) {
            instruction.space = space->second;
        } else if (const auto order = kOrders.find(part); order != kOrders.end()) {
            opcode.order = order->second;
            if (part == "volatile") instruction.scope = Scope::kSystem;
        } else if (const auto scope = kScopes.find(part); scope != kScopes.end()) {
            instruction.scope = scope->second;
        } else if (part == "v2" || part == "v4") {
            instruction.vector = static_cast<u8>(part[1] - '0');
        } else if (part == "add" || part == "cas" || part == "exch") {
            opcode.operation = part;
        } else if (text.empty()) {
            opcode.type = part;
        } else {
            known = known && part == "L1::no_allocate";
        }
    }
    return known;
}

template <template <class> class Made>
Handler by_type(std::string_view type) {
    if (type == "u8" || type == "b8") return Made<u8>::kHandler;
    if (type == "s8") return Made<i8>::kHandler;
    if (type == "u16" || type == "b16") return Made<u16>::kHandler;
    if (type == "s16") return Made<i16>::kHandler;
    if (type == "u32" || type == "b32" || type == "f32") return Made<u32>::kHandler;
    if (type == "s32") return Made<i32>::kHandler;
    if (type == "u64" || type == "b64" || type == "s64") return Made<u64>::kHandler;
    return nullptr;
}
template <class T>
struct Load {
    static constexpr Handler kHandler = load<T>;
};
template <class T>
struct Store {
    static constexpr Handler kHandler = store<T>;
};

// A strong access to a word of 32 or 64 bits.
#define DEEP_EP_OF_WORD(function, order)                                                            \
    (type == "b32" || type == "u32" || type == "s32"   ? static_cast<Handler>(function<u32, order>) \
     : type == "b64" || type == "u64" || type == "s64" ? static_cast<Handler>(function<u64, order>) \
                                                       : nullptr)

Handler find_load(const Opcode& opcode) {
    const std::string_view type = opcode.type;
    switch (opcode.order) {
        case Ordering::kWeak:
            return by_type<Load>(type);
        case Ordering::kRelaxed:
            return DEEP_EP_OF_WORD(strong_load, __ATOMIC_RELAXED);
        case Ordering::kAcquire:
            return DEEP_EP_OF_WORD(strong_load, __ATOMIC_ACQUIRE);
        case Ordering::kRelease:
        case Ordering::kAcqRel:
            break;
    }
    return nullptr;
}

Handler find_store(const Opcode& opcode) {
    const std::string_view type = opcode.type;
    switch (opcode.order) {
        case Ordering::kWeak:
            return by_type<Store>(type);
        case Ordering::kRelaxed:
            return DEEP_EP_OF_WORD(strong_store, __ATOMIC_RELAXED);
        case Ordering::kRelease:
            return DEEP_EP_OF_WORD(strong_store, __ATOMIC_RELEASE);
        case Ordering::kAcquire:
        case Ordering::kAcqRel:
            break;
    }
    return nullptr;
}

template <int kOrder>
Handler find_atomic_of(const Opcode& opcode) {
    const std::string_view type = opcode.type;
    if (opcode.operation == "add") return DEEP_EP_OF_WORD(atomic_add, kOrder);
    if (opcode.operation == "exch") return DEEP_EP_OF_WORD(atomic_exchange, kOrder);
    if (opcode.operation == "cas") return DEEP_EP_OF_WORD(atomic_compare, kOrder);
    return nullptr;
}

Handler find_reduction(const Opcode& opcode) {
    const std::string_view type = opcode.type;
    if (opcode.operation != "add") return nullptr;
    if (opcode.order == Ordering::kRelaxed) return DEEP_EP_OF_WORD(reduce_add, __ATOMIC_RELAXED);
    if (opcode.order == Ordering::kRelease) return DEEP_EP_OF_WORD(reduce_add, __ATOMIC_RELEASE);
    return nullptr;
}

Handler find_atomic(const Opcode& opcode) {
    switch (opcode.order) {
        case Ordering::kRelaxed:
            return find_atomic_of<__ATOMIC_RELAXED>(opcode);
        case Ordering::kAcquire:
            return find_atomic_of<__ATOMIC_ACQUIRE>(opcode);
        case Ordering::kRelease:
            return find_atomic_of<__ATOMIC_RELEASE>(opcode);
        case Ordering::kAcqRel:
            return find_atomic_of<__ATOMIC_ACQ_REL>(opcode);
        case Ordering::kWeak:
            break;
    }
    return nullptr;
}

#undef DEEP_EP_OF_WORD

}  // namespace

bool find_memory(std::string_view text, Instruction& instruction) {
    Opcode opcode;
    if (!take_apart(text, opcode, instruction)) return false;
    if (opcode.name == "ld") instruction.handler = find_load(opcode);
    if (opcode.name == "st") instruction.handler = find_store(opcode);
    if (opcode.name == "red") instruction.handler = find_reduction(opcode);
    if (opcode.name == "fence" && opcode.order == Ordering::kAcqRel) instruction.handler = fence;
    if (opcode.name == "atom") instruction.handler = find_atomic(opcode);
    return instruction.handler != nullptr;
}

}  // namespace deep_ep::ptx
