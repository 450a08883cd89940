// A stand-in for libcuda.so.1: it enforces the rules of the calls that are used, and behaves as badly as a driver may.
// As with the driver, any thread may call, and each has contexts of its own.
//
// A module is an ELF file or PTX. The variables of an ELF file are those of its symbol table, initialized from the
// image or with zeros; of its code only the kernels' names are used. PTX is interpreted (csrc/sim/ptx).
//
// Device memory is host memory, and never clean: it holds the contents of an earlier allocation, or a pattern. Launches
// are executed by execute_*.cpp. Streams share as many queues as CUDA_DEVICE_MAX_CONNECTIONS specified at
// initialization, 8 by default: kernels of one queue run one after the other. Launching a function whose code is not
// loaded waits for all running kernels, and no other call gets in meanwhile. It fails on demand:
//
//   DOUBLE_LOG      a file that receives a line for every call
//   DOUBLE_FAIL     "cuModuleLoadData=218": that call returns that error
//   DOUBLE_LARGEST  bytes: allocating a larger piece of a heap fails for lack of memory
//   DOUBLE_QUERIES  how many times streams report that their kernels still run
//   DOUBLE_MULTIPROCESSORS  number of multiprocessors
//   DOUBLE_MPS      processes share GPUs by MPS
//   DOUBLE_DEVICES  how many GPUs this process sees
//   DOUBLE_FIRST_GPU  which GPU of the machine is its first; the others follow, and after the machine's last comes its
//                   first
//   DOUBLE_MACHINE  how many GPUs the machine has
//   DOUBLE_HOST     a name of the machine, distinct from those of others
//   DOUBLE_PCIE     kernels access memory of GPUs with indices of different parity without native atomics
//   DOUBLE_APART    they cannot access it at all, and mapping it fails
//   DOUBLE_ONE_WAY  only the GPU with the lower index can access the memory of the other
//   DOUBLE_INSTANCES  this process's GPUs are instances (MIG) of the machine's, which access no others
//   DOUBLE_MAP_REFUSED  mapping memory of other GPUs fails, although it should work
//   DOUBLE_SHARED_BYTES  shared memory per block
//   DOUBLE_SERIAL   a launch returns when its kernel has ended, and until then no other starts, as under tools that
//                   watch kernels
//   DOUBLE_LOADS_WHEN_ASKED  a function's code is loaded by an occupancy query, not only by cuFuncLoad
//   DOUBLE_LOCAL_BYTES  per thread; a launch makes room for more than the context's limit, which is initially 1024
//   DOUBLE_COOPERATIVE_SERIAL  cooperative launches run one after the other
//   DOUBLE_MAP_WAITS  mapping memory waits for all running kernels
//   DOUBLE_MAP_HANGS  mapping memory never returns
//   DOUBLE_WATCH    a seed: races between kernels of PTX abort them, and loads may return old values. Each stream is
//                   assumed to belong to a rank with its own GPU
//   DOUBLE_NO_ORDERING  its kernels see a NIC's writes in any order
//   DOUBLE_OLD      supports neither cooperative launches nor host memory under its host address
//
// double_share(address, bytes) informs the executor of device memory that a NIC also uses: kernels must access it at
// system scope until double_unshare(address). double_own(address, bytes) declares memory allocated by others as the
// current device's, until double_disown(address).
//
// double_capture(1) and double_capture(0) begin and end a capture by the calling thread; the latter returns its number.
// Launches go into a graph, which double_replay(number) launches again and waits for. double_alive() counts what has
// been created and not released. double_begin_kernel(stream) begins a kernel of the program, which runs until
// double_end_kernel(number). After double_shut_down() every call fails, as when a process ends.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "double.h"

namespace driver_double {

int multiprocessors() {
    const char* given = std::getenv("DOUBLE_MULTIPROCESSORS");
    return given ? std::atoi(given) : 4;
}

int shared_bytes() {
    const char* given = std::getenv("DOUBLE_SHARED_BYTES");
    return given ? std::atoi(given) : 227 << 10;
}

namespace {

Context context_of(Device device) { return reinterpret_cast<Context>(static_cast<uintptr_t>(device) + 1); }
Device device_of(Context context) { return static_cast<Device>(reinterpret_cast<uintptr_t>(context) - 1); }

}  // namespace

Result enter(const char* name, const char* format, ...) {
    if (shut_down) return kDeinitialized;
    if (const char* log = std::getenv("DOUBLE_LOG")) {
        std::FILE* file = std::fopen(log, "a");
        std::fprintf(file, "%s ", name);
        std::va_list arguments;
        va_start(arguments, format);
        std::vfprintf(file, format, arguments);
        va_end(arguments);
        std::fprintf(file, "\n");
        std::fclose(file);
    }
    const std::string fail = std::getenv("DOUBLE_FAIL") ? std::getenv("DOUBLE_FAIL") : "";
    const size_t at = fail.find('=');
    if (at != std::string::npos && fail.substr(0, at) == name) return std::atoi(fail.c_str() + at + 1);
    return kSuccess;
}

Result enter_in_context(const char* name) {
    if (shut_down) return kDeinitialized;
    if (!initialized) return kNotInitialized;
    if (contexts.empty()) return kInvalidContext;
    return enter(name);
}

Result enter_outside_capture(const char* name) {
    if (capturing && capture_mode != kCaptureRelaxed) return kCaptureUnsupported;
    return enter_in_context(name);
}

}  // namespace driver_double

using namespace driver_double;

#pragma GCC visibility push(default)
extern "C" {

int double_alive() {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    return static_cast<int>(alive.size()) + alive_heaps();
}
void double_shut_down() {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    shut_down = true;
}
Result cuInit(unsigned) {
    const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    BEGIN(enter("cuInit", "connections=%s", connections ? connections : "unset"));
    if (!initialized && connections != nullptr) hardware_queues = std::atoi(connections);
    initialized = true;
    return kSuccess;
}
Result cuDriverGetVersion(int* version) {
    BEGIN(enter("cuDriverGetVersion"));
    const char* given = std::getenv("DOUBLE_DRIVER_VERSION");
    *version = given ? std::atoi(given) : 13000;
    return kSuccess;
}
Result cuGetErrorName(Result error, const char** text) {
    if (shut_down) return kDeinitialized;
    *text = error == 218 ? "CUDA_ERROR_INVALID_PTX" : error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : nullptr;
    return *text ? kSuccess : kInvalidValue;
}
Result cuGetErrorString(Result error, const char** text) {
    if (shut_down) return kDeinitialized;
    *text = error == 218 ? "a PTX JIT compilation failed" : error == 700 ? "an illegal memory access" : nullptr;
    return *text ? kSuccess : kInvalidValue;
}
Result cuDeviceGetCount(int* count) {
    BEGIN(enter("cuDeviceGetCount"));
    if (!initialized) return kNotInitialized;
    *count = devices();
    return kSuccess;
}
Result cuDeviceGet(Device* device, int ordinal) {
    BEGIN(enter("cuDeviceGet"));
    if (ordinal >= devices()) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
}
Result cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
    BEGIN(enter("cuDeviceGetUuid", "%d", device));
    const GpuName name = name_of_gpu(gpu_of_machine(device), flag("DOUBLE_INSTANCES"));
    std::memcpy(uuid->bytes, name.bytes, sizeof(uuid->bytes));
    return kSuccess;
}
Result cuDeviceGetP2PAttribute(int* value, int which, Device device, Device peer) {
    BEGIN(enter("cuDeviceGetP2PAttribute", "%d, %d and %d", which, device, peer));
    if (device == peer || device >= devices() || peer >= devices()) return kInvalidDevice;
    const int from = gpu_of_machine(device), to = gpu_of_machine(peer);
    *value = which == kPeerAccess ? has_access(from, to) : has_native_atomics(from, to);
    return which == kPeerAccess || which == kPeerNativeAtomics ? kSuccess : kInvalidValue;
}
Result cuDeviceGetName(char* name, int size, Device) {
    BEGIN(enter("cuDeviceGetName"));
    std::snprintf(name, static_cast<size_t>(size), "Double");
    return kSuccess;
}
Result cuDeviceGetAttribute(int* value, int which, Device device) {
    BEGIN(enter("cuDeviceGetAttribute", "%d", which));
    switch (which) {
        case kMultiprocessorCount:
            *value = multiprocessors();
            return kSuccess;
        case kComputeCapabilityMajor:
            *value = device == 0 ? 9 : 8;
            return kSuccess;
        case kComputeCapabilityMinor:
            *value = 0;
            return kSuccess;
        case kMaxSharedPerBlockOptin:
            *value = shared_bytes();
            return kSuccess;
        case kNicWritesOrdering:
            *value = std::getenv("DOUBLE_NO_ORDERING") ? kNoNicWritesOrdering : 100;
            return kSuccess;
        case kCooperativeLaunch:
        case kCanUseHostPointer:
            *value = std::getenv("DOUBLE_OLD") ? 0 : 1;
            return kSuccess;
        case kMpsEnabled:
            *value = std::getenv("DOUBLE_MPS") ? 1 : 0;
            return std::getenv("DOUBLE_OLD") ? kInvalidValue : kSuccess;
        default:
            return kInvalidValue;
    }
}
Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
    BEGIN(enter("cuDevicePrimaryCtxRetain"));
    *context = context_of(device);
    return kSuccess;
}
Result cuDevicePrimaryCtxRelease_v2(Device) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    return enter("cuDevicePrimaryCtxRelease", "alive=%d", double_alive());
}
Result cuCtxPushCurrent_v2(Context context) {
    if (shut_down) return kDeinitialized;
    contexts.push_back(device_of(context));
    return kSuccess;
}
Result cuCtxGetCurrent(Context* context) {
    if (shut_down) return kDeinitialized;
    if (!initialized) return kNotInitialized;
    *context = contexts.empty() ? nullptr : context_of(contexts.back());
    return kSuccess;
}
Result cuCtxPopCurrent_v2(Context*) {
    if (shut_down) return kDeinitialized;
    if (contexts.empty()) return kInvalidContext;
    contexts.pop_back();
    return kSuccess;
}
}  // extern "C"
#pragma GCC visibility pop
