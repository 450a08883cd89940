// Qualifier for arithmetic that is the same on every target and may be used by kernels, hosts and tests.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define DEEP_EP_ANYWHERE __device__ __forceinline__
#else
#define DEEP_EP_ANYWHERE inline
#endif
