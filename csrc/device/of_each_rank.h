// The ranks of one process in one launch: blockIdx.y says whose a block is. For programs of such launches alone, which
// include this before a kernel's header.
#pragma once

#include "device/device.h"

namespace deep_ep::device {
namespace detail {

template <class Args>
Args args_of(void (*)(Args));

}  // namespace detail

// The grid is (blocks, ranks), `args` an array of a kernel's arguments by rank. A kernel knows of x alone and finds
// itself in a launch of its rank's own. The host has written the array before the launch and leaves it until that has
// ended: plain loads do.
template <auto kKernel>
DEEP_EP_KERNEL void of_each_rank(const void* args) {
    kKernel(static_cast<const decltype(detail::args_of(kKernel))*>(args)[blockIdx.y]);
}

}  // namespace deep_ep::device

// In such a program a kernel is a function that is called from there, as kernels are on a CPU.
#undef DEEP_EP_KERNEL
#undef DEEP_EP_ARGUMENT
#define DEEP_EP_KERNEL DEEP_EP_DEVICE
#define DEEP_EP_ARGUMENT
