// A block's shared memory.
#pragma once

#include "sim/executor/device_calls.h"
#include "wire/types.h"

namespace deep_ep::device::detail {

// Extents are part of the type, so that one macro serves arrays and structs: DEEP_EP_SHARED(u32[4], flags).
template <class T>
using SharedType = T;

// `Tag` is a local class of the kernel: one per variable and instantiation.
template <class Tag, class T>
T& static_shared(const char* file, int line) {
    static const char key = 0;
    return *static_cast<T*>(cpu::static_shared(&key, sizeof(T), alignof(T) < 16 ? 16 : alignof(T), {file, line}));
}

}  // namespace deep_ep::device::detail

#define DEEP_EP_SHARED(type, name)                                                                                     \
    struct DeepEpSharedTag_##name {};                                                                                  \
    auto& name =                                                                                                       \
        ::deep_ep::device::detail::static_shared<DeepEpSharedTag_##name, ::deep_ep::device::detail::SharedType<type>>( \
            __FILE__, __LINE__)

#define DEEP_EP_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(::deep_ep::cpu::dynamic_shared())
