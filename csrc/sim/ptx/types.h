// PTX types and the opcode suffixes that name them.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "sim/ptx/module.h"
#include "wire/types.h"

namespace deep_ep::ptx {

using i8 = signed char;
using i16 = short;
using f32 = float;

template <class T>
struct TypeName;
template <>
struct TypeName<bool> {
    static constexpr const char* kName = "pred";
};
#define DEEP_EP_TYPE_NAME(type, name)              \
    template <>                                    \
    struct TypeName<type> {                        \
        static constexpr const char* kName = name; \
    };
DEEP_EP_TYPE_NAME(u8, "u8")
DEEP_EP_TYPE_NAME(u16, "u16")
DEEP_EP_TYPE_NAME(u32, "u32")
DEEP_EP_TYPE_NAME(u64, "u64")
DEEP_EP_TYPE_NAME(i8, "s8")
DEEP_EP_TYPE_NAME(i16, "s16")
DEEP_EP_TYPE_NAME(i32, "s32")
DEEP_EP_TYPE_NAME(i64, "s64")
DEEP_EP_TYPE_NAME(f32, "f32")
#undef DEEP_EP_TYPE_NAME

using Handlers = std::unordered_map<std::string, Handler>;

inline Handler look_up(const Handlers& handlers, std::string_view opcode) {
    const auto found = handlers.find(std::string(opcode));
    return found == handlers.end() ? nullptr : found->second;
}

}  // namespace deep_ep::ptx
