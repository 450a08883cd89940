// The part of the CUDA driver's interface that is used here. It is declared here so that building does not require
// CUDA. tests/native/driver_double/cuda_header.cpp compares it with the driver's own header if there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deep_ep::host::cuda {

using Result = int;
using Device = int;

struct ContextObject;
struct ModuleObject;
struct FunctionObject;
struct StreamObject;
struct EventObject;
struct GraphObject;
struct GraphNodeObject;
struct UserObjectObject;
using Context = ContextObject*;
using Module = ModuleObject*;
using Function = FunctionObject*;
using Stream = StreamObject*;
using Event = EventObject*;
using Graph = GraphObject*;
using GraphNode = GraphNodeObject*;
using UserObject = UserObjectObject*;
using HostFunction = void (*)(void*);
using DevicePointer = unsigned long long;
using Allocation = unsigned long long;  // CUmemGenericAllocationHandle

constexpr Result kSuccess = 0;
constexpr Result kDeinitialized = 4;
constexpr Result kNotReady = 600;

constexpr int kMultiprocessorCount = 16;  // CUdevice_attribute
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kCanUseHostPointer = 91;
constexpr int kCooperativeLaunch = 95;
constexpr int kMpsEnabled = 133;
constexpr int kMaxSharedPerBlockOptin = 97;
// Which running kernels see the writes of a NIC in the order in which it has made them: none (0), those of this GPU
// (100), or those of every GPU (200).
constexpr int kNicWritesOrdering = 118, kNoNicWritesOrdering = 0;

constexpr int kPointerDevice = 9;  // CUpointer_attribute: the ordinal of the device that owns the memory

constexpr int kPeerAccess = 2, kPeerNativeAtomics = 3;  // CUdevice_P2PAttribute

constexpr int kSharedSizeBytes = 1;  // CUfunction_attribute
constexpr int kLocalSizeBytes = 3;
constexpr int kMaxDynamicSharedSizeBytes = 8;

constexpr int kLimitStackSize = 0;  // CUlimit

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventTimed = 0, kEventDisableTiming = 2;

constexpr int kCaptureNone = 0;     // CUstreamCaptureStatus
constexpr int kCaptureRelaxed = 2;  // CUstreamCaptureMode

constexpr unsigned kNoDestructorSync = 1;  // CUuserObject_flags
constexpr unsigned kRetainMove = 1;        // CUuserObjectRetain_flags

constexpr unsigned kHostPortable = 1, kHostDeviceMap = 2;          // CU_MEMHOSTALLOC_*
constexpr unsigned kRegisterPortable = 1, kRegisterDeviceMap = 2;  // CU_MEMHOSTREGISTER_*

constexpr int kAllocationPinned = 1;  // CUmemAllocationType
constexpr int kLocationDevice = 1;    // CUmemLocationType
constexpr int kHandleNone = 0;        // CUmemAllocationHandleType
constexpr int kHandleFileDescriptor = 1;
constexpr int kAccessReadWrite = 3;         // CUmemAccess_flags
constexpr int kGranularityRecommended = 1;  // CUmemAllocationGranularity_flags

struct Uuid {
    char bytes[16];
};
static_assert(sizeof(Uuid) == 16, "CUuuid");

struct MemoryLocation {
    int type;
    int id;
};
struct AllocationProperties {
    int type;
    int handle_types;
    MemoryLocation location;
    void* unused;
    unsigned char flags[8];
};
static_assert(sizeof(AllocationProperties) == 32, "CUmemAllocationProp");
struct MemoryAccess {
    MemoryLocation location;
    int flags;
};
static_assert(sizeof(MemoryAccess) == 12, "CUmemAccessDesc");

constexpr int kLaunchCooperative = 2;  // CUlaunchAttributeID

struct LaunchAttribute {
    int id;
    char padding[4];
    union {
        char bytes[64];
        int cooperative;
    } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute");

struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    Stream stream;
    LaunchAttribute* attributes;
    unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32, "CUlaunchConfig");

// Name used here, symbol in the library, arguments.
#define DEEP_EP_CUDA_FUNCTIONS(X)                                                                                     \
    X(init, cuInit, unsigned)                                                                                         \
    X(driver_version, cuDriverGetVersion, int*)                                                                       \
    X(error_name, cuGetErrorName, Result, const char**)                                                               \
    X(error_string, cuGetErrorString, Result, const char**)                                                           \
    X(device_count, cuDeviceGetCount, int*)                                                                           \
    X(device_get, cuDeviceGet, Device*, int)                                                                          \
    X(device_attribute, cuDeviceGetAttribute, int*, int, Device)                                                      \
    X(device_name, cuDeviceGetName, char*, int, Device)                                                               \
    X(device_uuid, cuDeviceGetUuid_v2, Uuid*, Device)                                                                 \
    X(peer_attribute, cuDeviceGetP2PAttribute, int*, int, Device, Device)                                             \
    X(pointer_attribute, cuPointerGetAttribute, void*, int, DevicePointer)                                            \
    X(primary_context_retain, cuDevicePrimaryCtxRetain, Context*, Device)                                             \
    X(primary_context_release, cuDevicePrimaryCtxRelease_v2, Device)                                                  \
    X(context_push, cuCtxPushCurrent_v2, Context)                                                                     \
    X(context_pop, cuCtxPopCurrent_v2, Context*)                                                                      \
    X(context_synchronize, cuCtxSynchronize, void)                                                                    \
    X(context_limit, cuCtxGetLimit, size_t*, int)                                                                     \
    X(context_set_limit, cuCtxSetLimit, int, size_t)                                                                  \
    X(module_load, cuModuleLoadData, Module*, const void*)                                                            \
    X(module_unload, cuModuleUnload, Module)                                                                          \
    X(module_function, cuModuleGetFunction, Function*, Module, const char*)                                           \
    X(module_global, cuModuleGetGlobal_v2, DevicePointer*, size_t*, Module, const char*)                              \
    X(function_attribute, cuFuncGetAttribute, int*, int, Function)                                                    \
    X(function_set_attribute, cuFuncSetAttribute, Function, int, int)                                                 \
    X(occupancy, cuOccupancyMaxActiveBlocksPerMultiprocessor, int*, Function, int, size_t)                            \
    X(launch, cuLaunchKernelEx, const LaunchConfig*, Function, void**, void**)                                        \
    X(stream_create, cuStreamCreateWithPriority, Stream*, unsigned, int)                                              \
    X(stream_destroy, cuStreamDestroy_v2, Stream)                                                                     \
    X(stream_query, cuStreamQuery, Stream)                                                                            \
    X(stream_wait_event, cuStreamWaitEvent, Stream, Event, unsigned)                                                  \
    X(stream_priorities, cuCtxGetStreamPriorityRange, int*, int*)                                                     \
    X(event_create, cuEventCreate, Event*, unsigned)                                                                  \
    X(event_destroy, cuEventDestroy_v2, Event)                                                                        \
    X(event_record, cuEventRecord, Event, Stream)                                                                     \
    X(event_synchronize, cuEventSynchronize, Event)                                                                   \
    X(event_elapsed, cuEventElapsedTime, float*, Event, Event)                                                        \
    X(stream_synchronize, cuStreamSynchronize, Stream)                                                                \
    X(stream_is_capturing, cuStreamIsCapturing, Stream, int*)                                                         \
    X(capture_info, cuStreamGetCaptureInfo_v2, Stream, int*, unsigned long long*, Graph*, const GraphNode**, size_t*) \
    X(user_object_create, cuUserObjectCreate, UserObject*, void*, HostFunction, unsigned, unsigned)                   \
    X(graph_retain, cuGraphRetainUserObject, Graph, UserObject, unsigned, unsigned)                                   \
    X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, int*)                                                 \
    X(memory_allocate, cuMemAlloc_v2, DevicePointer*, size_t)                                                         \
    X(memory_free, cuMemFree_v2, DevicePointer)                                                                       \
    X(host_allocate, cuMemHostAlloc, void**, size_t, unsigned)                                                        \
    X(host_free, cuMemFreeHost, void*)                                                                                \
    X(host_register, cuMemHostRegister_v2, void*, size_t, unsigned)                                                   \
    X(host_unregister, cuMemHostUnregister, void*)                                                                    \
    X(fill, cuMemsetD8Async, DevicePointer, unsigned char, size_t, Stream)                                            \
    X(copy_to_device, cuMemcpyHtoDAsync_v2, DevicePointer, const void*, size_t, Stream)                               \
    X(copy_to_host, cuMemcpyDtoHAsync_v2, void*, DevicePointer, size_t, Stream)                                       \
    X(granularity, cuMemGetAllocationGranularity, size_t*, const AllocationProperties*, int)                          \
    X(address_reserve, cuMemAddressReserve, DevicePointer*, size_t, size_t, DevicePointer, unsigned long long)        \
    X(address_free, cuMemAddressFree, DevicePointer, size_t)                                                          \
    X(allocation_create, cuMemCreate, Allocation*, size_t, const AllocationProperties*, unsigned long long)           \
    X(allocation_release, cuMemRelease, Allocation)                                                                   \
    X(allocation_export, cuMemExportToShareableHandle, void*, Allocation, int, unsigned long long)                    \
    X(allocation_import, cuMemImportFromShareableHandle, Allocation*, void*, int)                                     \
    X(memory_map, cuMemMap, DevicePointer, size_t, size_t, Allocation, unsigned long long)                            \
    X(memory_unmap, cuMemUnmap, DevicePointer, size_t)                                                                \
    X(memory_set_access, cuMemSetAccess, DevicePointer, size_t, const MemoryAccess*, size_t)

// Functions that older drivers lack; null there.
#define DEEP_EP_CUDA_OPTIONAL_FUNCTIONS(X) X(function_load, cuFuncLoad, Function)

}  // namespace deep_ep::host::cuda
