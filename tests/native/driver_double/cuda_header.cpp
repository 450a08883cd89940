// Compiles only if our declarations of the CUDA driver match those of its header.
#include <cuda.h>

#include <type_traits>

#include "host/cuda/driver_types.h"

using namespace deep_ep::host::cuda;

static_assert(kSuccess == CUDA_SUCCESS && kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(kMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kComputeCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kCanUseHostPointer == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
static_assert(kCooperativeLaunch == CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
static_assert(kMpsEnabled == CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
static_assert(kPeerAccess == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED);
static_assert(kPeerNativeAtomics == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
static_assert(kPointerDevice == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(kSharedSizeBytes == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
static_assert(kLocalSizeBytes == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES && kLimitStackSize == CU_LIMIT_STACK_SIZE);
static_assert(kMaxSharedPerBlockOptin == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(kMaxDynamicSharedSizeBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING && kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE && kCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kLaunchCooperative == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute) && sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(offsetof(LaunchConfig, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(LaunchConfig, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(LaunchConfig, attribute_count) == offsetof(CUlaunchConfig, numAttrs));

static_assert(kHostPortable == CU_MEMHOSTALLOC_PORTABLE && kHostDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE && kRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED && kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(kHandleNone == CU_MEM_HANDLE_TYPE_NONE);
static_assert(kHandleFileDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kGranularityRecommended == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(sizeof(Uuid) == sizeof(CUuuid));
static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProperties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(MemoryAccess) == sizeof(CUmemAccessDesc) &&
              offsetof(MemoryAccess, flags) == offsetof(CUmemAccessDesc, flags));

// The same number of arguments, each of the same size and kind.
template <class Ours, class Theirs>
constexpr bool same_kind = sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;
template <class... Ours, class... Theirs>
constexpr bool same(void (*)(Ours...), CUresult (*)(Theirs...)) {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
        return false;
    } else {
        return (same_kind<Ours, Theirs> && ...);
    }
}
#if CUDA_VERSION >= 13000
// Headers from 13.0 on omit it in favor of a version that also has edges; drivers still have it. Declared as in 12.x.
extern "C" CUresult cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*,
                                              const CUgraphNode**, size_t*);
#endif
#define TAKES(name, symbol, ...) \
    static_assert(same(static_cast<void (*)(__VA_ARGS__)>(nullptr), static_cast<decltype(&symbol)>(nullptr)), #symbol);
DEEP_EP_CUDA_FUNCTIONS(TAKES)
#if CUDA_VERSION >= 12040
DEEP_EP_CUDA_OPTIONAL_FUNCTIONS(TAKES)
#endif
