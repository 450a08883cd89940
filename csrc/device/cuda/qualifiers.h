// Qualifiers. CUDA's own are built into the compiler.
#pragma once

#include "device/cuda/block_size.h"

#define DEEP_EP_DEVICE __device__ __forceinline__
#define DEEP_EP_DEVICE_CALL __device__ __noinline__
#define DEEP_EP_KERNEL __global__ __launch_bounds__(deep_ep::device::kBlockThreads, 1)
// Without it, each thread copies the argument into its local memory if a called function gets a reference to it.
#define DEEP_EP_ARGUMENT __grid_constant__
