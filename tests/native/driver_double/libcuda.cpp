// A stand-in for libcuda.so.1: knows the rules of the calls that are used, and behaves as badly as a driver may. As
// with the driver, any thread may call, and has contexts of its own.
//
// A module is an ELF file or PTX. The variables of an ELF file are those of its symbol table, with what the image puts
// there or zeros; of its code it takes the kernels' names. PTX is interpreted (csrc/ptx).
//
// Device memory is the host's, and never clean: it holds what an earlier allocation has left, else a pattern. What a
// launch does is execute_*.cpp's. Streams share as many queues as CUDA_DEVICE_MAX_CONNECTIONS said when it was
// initialised, else 8: kernels of one queue run one after the other. A function whose code is not there when it is
// launched waits for all kernels that run, and no other call gets in meanwhile. It breaks on demand:
//
//   DOUBLE_LOG      a file that gets a line for every call
//   DOUBLE_FAIL     "cuModuleLoadData=218": that call returns that error
//   DOUBLE_LARGEST  bytes: there is no memory for a heap's piece that is larger
//   DOUBLE_QUERIES  how many times an event says that its kernel still runs
//   DOUBLE_MULTIPROCESSORS  how many it has
//   DOUBLE_DEVICES  how many GPUs this process sees
//   DOUBLE_FIRST_GPU  which GPU of the machine is its first; the others follow, and the machine's first comes again
//                   behind its last
//   DOUBLE_MACHINE  how many GPUs the machine has
//   DOUBLE_HOST     a name of the machine, of which no other's GPUs are
//   DOUBLE_PCIE     kernels use the memory of GPUs whose numbers are one odd and one even without native atomics
//   DOUBLE_APART    they do not use it at all
//   DOUBLE_SHARED_BYTES  of shared memory that a block may have
//   DOUBLE_SERIAL   a launch returns when its kernel has ended, and until then there is no other, as under tools that
//                   watch kernels
//   DOUBLE_LOADS_WHEN_ASKED  a function's code is there once its occupancy has been asked for, not by cuFuncLoad alone
//   DOUBLE_LOCAL_BYTES  of each thread; more than the context's limit, 1024 at first, is made room for at a launch
//   DOUBLE_COOPERATIVE_SERIAL  cooperative launches run one after the other
//   DOUBLE_MAP_WAITS  to map memory it waits for all kernels that run
//   DOUBLE_MAP_HANGS  it never returns from mapping memory
//   DOUBLE_WATCH    a seed: races between kernels of PTX end them, and loads may return old values. Each stream is
//                   taken for that of a rank with a GPU of its own
//   DOUBLE_NO_ORDERING  its kernels see a NIC's writes in any order
//   DOUBLE_OLD      it can do neither cooperative launches nor use the host's memory under its address
//
// double_share(address, bytes) tells the executor of device memory that a NIC uses too: kernels keep to accesses at
// system scope there, until double_unshare(address). double_own(address, bytes) says that memory which others have
// allocated is the current device's, until double_disown(address).
//
// double_capture(1) and double_capture(0) begin and end a capture by the calling thread: launches go into a graph,
// which double_replay(number) launches again and waits for; -> its number. double_alive() counts what has been made and
// not given back. After double_shut_down() every call fails, as when a process ends.
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

int devices() {
    const char* given = std::getenv("DOUBLE_DEVICES");
    return given ? std::atoi(given) : 2;
}

int gpu_of_machine(Device device) {
    const char *const first = std::getenv("DOUBLE_FIRST_GPU"), *const all = std::getenv("DOUBLE_MACHINE");
    return (device + (first ? std::atoi(first) : 0)) % (all ? std::atoi(all) : devices());
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
    *version = 13000;
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
    std::memset(uuid->bytes, 0, sizeof(uuid->bytes));
    const char* const host = std::getenv("DOUBLE_HOST");
    std::snprintf(uuid->bytes, sizeof(uuid->bytes), "%s %d", host ? host : "double", gpu_of_machine(device));
    return kSuccess;
}
Result cuDeviceGetP2PAttribute(int* value, int which, Device device, Device peer) {
    BEGIN(enter("cuDeviceGetP2PAttribute", "%d, %d and %d", which, device, peer));
    if (device == peer || device >= devices() || peer >= devices()) return kInvalidDevice;
    const bool odd = (gpu_of_machine(device) + gpu_of_machine(peer)) % 2 != 0;
    const bool apart = odd && std::getenv("DOUBLE_APART") != nullptr;
    *value = !apart && (which == kPeerAccess || !odd || std::getenv("DOUBLE_PCIE") == nullptr);
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
