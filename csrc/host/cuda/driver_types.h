// The CUDA driver's interface as far as it is used here, declared by ourselves: nothing of CUDA need be installed to
// build. tests/native/cuda_header.cpp compares it with the driver's own header where there is one.
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
using Context = ContextObject*;
using Module = ModuleObject*;
using Function = FunctionObject*;
using Stream = StreamObject*;
using Event = EventObject*;

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;

constexpr int kMultiprocessorCount = 16;  // CUdevice_attribute
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kCooperativeLaunch = 95;

constexpr int kMaxDynamicSharedSizeBytes = 8;  // CUfunction_attribute

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;

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

// Name here, symbol in the library, arguments.
#define DEEP_EP_CUDA_FUNCTIONS(X)                                                          \
    X(init, cuInit, unsigned)                                                              \
    X(driver_version, cuDriverGetVersion, int*)                                            \
    X(error_name, cuGetErrorName, Result, const char**)                                    \
    X(error_string, cuGetErrorString, Result, const char**)                                \
    X(device_count, cuDeviceGetCount, int*)                                                \
    X(device_get, cuDeviceGet, Device*, int)                                               \
    X(device_attribute, cuDeviceGetAttribute, int*, int, Device)                           \
    X(device_name, cuDeviceGetName, char*, int, Device)                                    \
    X(primary_context_retain, cuDevicePrimaryCtxRetain, Context*, Device)                  \
    X(primary_context_release, cuDevicePrimaryCtxRelease_v2, Device)                       \
    X(context_push, cuCtxPushCurrent_v2, Context)                                          \
    X(context_pop, cuCtxPopCurrent_v2, Context*)                                           \
    X(module_load, cuModuleLoadData, Module*, const void*)                                 \
    X(module_unload, cuModuleUnload, Module)                                               \
    X(module_function, cuModuleGetFunction, Function*, Module, const char*)                \
    X(function_set_attribute, cuFuncSetAttribute, Function, int, int)                      \
    X(occupancy, cuOccupancyMaxActiveBlocksPerMultiprocessor, int*, Function, int, size_t) \
    X(launch, cuLaunchKernelEx, const LaunchConfig*, Function, void**, void**)             \
    X(stream_create, cuStreamCreateWithPriority, Stream*, unsigned, int)                   \
    X(stream_destroy, cuStreamDestroy_v2, Stream)                                          \
    X(stream_priorities, cuCtxGetStreamPriorityRange, int*, int*)                          \
    X(stream_wait, cuStreamWaitEvent, Stream, Event, unsigned)                             \
    X(event_create, cuEventCreate, Event*, unsigned)                                       \
    X(event_destroy, cuEventDestroy_v2, Event)                                             \
    X(event_record, cuEventRecord, Event, Stream)                                          \
    X(event_query, cuEventQuery, Event)

}  // namespace deep_ep::host::cuda
