// A stand-in for libcuda.so.1: knows the rules of the calls that are used, and breaks on demand. It runs no kernel.
//
//   DOUBLE_LOG      a file that gets a line for every call
//   DOUBLE_FAIL     "cuModuleLoadData=218": that call returns that error
//   DOUBLE_QUERIES  how many times an event says that its kernel still runs
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>

#include "host/cuda/driver_types.h"

using namespace deep_ep::host::cuda;

namespace {

constexpr Result kInvalidValue = 1, kNotInitialized = 3, kInvalidImage = 200, kInvalidContext = 201,
                 kInvalidHandle = 400, kNotFound = 500, kTooLarge = 720;
constexpr int kMultiprocessors = 4, kBlocksEach = 2;

bool initialized = false;
int contexts_pushed = 0;
std::set<const void*> alive;             // modules, streams, events
std::map<const void*, int> event_waits;  // queries until a recorded event has happened
uintptr_t next_handle = 0x1000;

template <class Handle>
Handle make() {
    auto* handle = reinterpret_cast<Handle>(next_handle += 0x10);
    alive.insert(handle);
    return handle;
}

// A line in the log, and the error that a test asks this call for.
Result enter(const char* name, const char* format = "", ...) {
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
    if (!initialized) return kNotInitialized;
    if (contexts_pushed == 0) return kInvalidContext;
    return enter(name);
}

// Every call begins with one of these.
#define BEGIN(...)                                                           \
    do {                                                                     \
        if (const Result result = (__VA_ARGS__); result != 0) return result; \
    } while (false)

Result forget(const void* handle) { return alive.erase(handle) == 1 ? kSuccess : kInvalidHandle; }

}  // namespace

extern "C" {

Result cuInit(unsigned) {
    BEGIN(enter("cuInit"));
    initialized = true;
    return kSuccess;
}
Result cuDriverGetVersion(int* version) {
    BEGIN(enter("cuDriverGetVersion"));
    *version = 13000;
    return kSuccess;
}
Result cuGetErrorName(Result error, const char** text) {
    *text = error == 218 ? "CUDA_ERROR_INVALID_PTX" : error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : nullptr;
    return *text ? kSuccess : kInvalidValue;
}
Result cuGetErrorString(Result error, const char** text) {
    *text = error == 218 ? "a PTX JIT compilation failed" : error == 700 ? "an illegal memory access" : nullptr;
    return *text ? kSuccess : kInvalidValue;
}
Result cuDeviceGetCount(int* count) {
    BEGIN(enter("cuDeviceGetCount"));
    *count = 2;
    return kSuccess;
}
Result cuDeviceGet(Device* device, int ordinal) {
    BEGIN(enter("cuDeviceGet"));
    *device = ordinal;
    return kSuccess;
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
            *value = kMultiprocessors;
            return kSuccess;
        case kComputeCapabilityMajor:
            *value = device == 0 ? 9 : 8;
            return kSuccess;
        case kComputeCapabilityMinor:
            *value = 0;
            return kSuccess;
        case kCooperativeLaunch:
            *value = std::getenv("DOUBLE_OLD") ? 0 : 1;
            return kSuccess;
        default:
            return kInvalidValue;
    }
}
Result cuDevicePrimaryCtxRetain(Context* context, Device) {
    BEGIN(enter("cuDevicePrimaryCtxRetain"));
    *context = reinterpret_cast<Context>(0x1);
    return kSuccess;
}
Result cuDevicePrimaryCtxRelease_v2(Device) { return enter("cuDevicePrimaryCtxRelease", "alive=%zu", alive.size()); }
Result cuCtxPushCurrent_v2(Context) {
    ++contexts_pushed;
    return kSuccess;
}
Result cuCtxPopCurrent_v2(Context*) { return contexts_pushed-- > 0 ? kSuccess : kInvalidContext; }
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    BEGIN(enter_in_context("cuCtxGetStreamPriorityRange"));
    *least = 0;
    *greatest = -5;
    return kSuccess;
}
Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
    BEGIN(enter_in_context("cuStreamCreateWithPriority"));
    BEGIN(enter("stream", "flags=%u priority=%d", flags, priority));
    *stream = make<Stream>();
    return kSuccess;
}
Result cuStreamDestroy_v2(Stream stream) {
    BEGIN(enter_in_context("cuStreamDestroy"));
    return forget(stream);
}
Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
    BEGIN(enter_in_context("cuStreamWaitEvent"));
    return alive.count(stream) && alive.count(event) ? kSuccess : kInvalidHandle;
}
Result cuModuleLoadData(Module* module, const void* image) {
    BEGIN(enter_in_context("cuModuleLoadData"));
    if (std::memcmp(image,
                    "\x7f"
                    "ELF",
                    4) != 0)
        return kInvalidImage;
    *module = make<Module>();
    return kSuccess;
}
Result cuModuleUnload(Module module) {
    BEGIN(enter_in_context("cuModuleUnload"));
    return forget(module);
}
Result cuModuleGetFunction(Function* function, Module module, const char* symbol) {
    BEGIN(enter_in_context("cuModuleGetFunction"));
    if (!alive.count(module)) return kInvalidHandle;
    if (std::strncmp(symbol, "_Z", 2) != 0) return kNotFound;
    *function = reinterpret_cast<Function>(next_handle += 0x10);
    return kSuccess;
}
Result cuFuncSetAttribute(Function, int which, int value) {
    BEGIN(enter_in_context("cuFuncSetAttribute"));
    return enter("attribute", "%d=%d", which, value);
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function, int threads, size_t) {
    BEGIN(enter_in_context("cuOccupancyMaxActiveBlocksPerMultiprocessor"));
    *blocks = threads <= 1024 ? kBlocksEach : 0;
    return kSuccess;
}
Result cuLaunchKernelEx(const LaunchConfig* config, Function, void** parameters, void** extra) {
    BEGIN(enter_in_context("cuLaunchKernelEx"));
    if (extra != nullptr || !alive.count(config->stream)) return kInvalidValue;
    const bool cooperative = config->attribute_count == 1 && config->attributes[0].id == kLaunchCooperative &&
                             config->attributes[0].value.cooperative == 1;
    if (config->grid[0] > kMultiprocessors * kBlocksEach) return kTooLarge;
    uint64_t first = 0;
    std::memcpy(&first, parameters[0], sizeof(first));
    return enter("launch", "grid=%u,%u,%u block=%u,%u,%u shared=%u cooperative=%d args=%llx", config->grid[0],
                 config->grid[1], config->grid[2], config->block[0], config->block[1], config->block[2],
                 config->shared_bytes, cooperative, static_cast<unsigned long long>(first));
}
Result cuEventCreate(Event* event, unsigned flags) {
    BEGIN(enter_in_context("cuEventCreate"));
    if (flags != kEventDisableTiming) return kInvalidValue;
    *event = make<Event>();
    return kSuccess;
}
Result cuEventDestroy_v2(Event event) {
    BEGIN(enter_in_context("cuEventDestroy"));
    return forget(event);
}
Result cuEventRecord(Event event, Stream stream) {
    BEGIN(enter_in_context("cuEventRecord"));
    if (!alive.count(event) || !alive.count(stream)) return kInvalidHandle;
    event_waits[event] = std::getenv("DOUBLE_QUERIES") ? std::atoi(std::getenv("DOUBLE_QUERIES")) : 0;
    return kSuccess;
}
Result cuEventQuery(Event event) {
    BEGIN(enter_in_context("cuEventQuery"));
    if (!alive.count(event)) return kInvalidHandle;
    return event_waits[event]-- > 0 ? kNotReady : kSuccess;
}

}  // extern "C"
