// A block's shared memory.
#pragma once

#include "wire/types.h"

namespace deep_ep::device::detail {

// Extents are part of the type, so that one macro serves arrays and structs: DEEP_EP_SHARED(u32[4], flags).
template <class T>
struct SharedType {
    using Type = T;
};

}  // namespace deep_ep::device::detail

#define DEEP_EP_SHARED(type, name) __shared__ typename ::deep_ep::device::detail::SharedType<type>::Type name

// All kernels of a program refer to the same bytes: those of the launch.
extern __shared__ __align__(128) unsigned char deep_ep_dynamic_shared[];

#define DEEP_EP_DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(deep_ep_dynamic_shared)
