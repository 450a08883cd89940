// Qualifiers. CUDA's own are built into the compiler.
#pragma once

#define DEEP_EP_DEVICE __device__ __forceinline__
#define DEEP_EP_KERNEL __global__
