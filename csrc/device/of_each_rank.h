// Runs the ranks of one process in one launch: blockIdx.y is the rank that a block belongs to. Only programs with such
// launches include this, before a kernel's header.
#pragma once

#include "device/device.h"

namespace deep_ep::device {
namespace detail {

template <class Args>
Args args_of(void (*)(Args));

}  // namespace detail

// The grid is (blocks, ranks), and `args` is an array of a kernel's arguments by rank. A kernel uses only x, so to it
// the launch looks like one of its rank alone. The host has written the array before the launch and keeps it until the
// launch has ended: plain loads suffice.
template <auto kKernel>
DEEP_EP_KERNEL void of_each_rank(const void* args) {
    kKernel(static_cast<const decltype(detail::args_of(kKernel))*>(args)[blockIdx.y]);
}

}  // namespace deep_ep::device

// In such a program a kernel is a function called from there, as kernels are on a CPU.
#undef DEEP_EP_KERNEL
#undef DEEP_EP_ARGUMENT
#define DEEP_EP_KERNEL DEEP_EP_DEVICE
#define DEEP_EP_ARGUMENT
