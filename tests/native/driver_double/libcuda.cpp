// A stand-in for libcuda.so.1: knows the rules of the calls that are used, and breaks on demand. Device memory is the
// host's. What a launch does is execute_*.cpp's. As with the driver, any thread may call, and has contexts of its own.
//
//   DOUBLE_LOG      a file that gets a line for every call
//   DOUBLE_FAIL     "cuModuleLoadData=218": that call returns that error
//   DOUBLE_LARGEST  bytes: there is no memory for a heap's piece that is larger
//   DOUBLE_QUERIES  how many times an event says that its kernel still runs
//   DOUBLE_MULTIPROCESSORS  how many it has
//   DOUBLE_SERIAL   a launch returns when its kernel has ended, and until then there is no other, as under tools that
//                   watch kernels
//   DOUBLE_OLD      it can do neither cooperative launches nor use the host's memory under its address
//
// double_capture(1) and double_capture(0) begin and end a capture by the calling thread: launches go into a graph,
// which double_replay(number) launches again and waits for; -> its number. double_alive() counts what has been made and
// not given back.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "execute.h"
#include "host/cuda/driver_types.h"

using namespace deep_ep::host::cuda;

namespace {

constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidImage = 200, kInvalidContext = 201,
                 kInvalidHandle = 400, kNotFound = 500, kAlreadyRegistered = 712, kTooLarge = 720,
                 kCaptureUnsupported = 900;
constexpr size_t kGranularity = 2 << 20;
constexpr int kBlocksEach = 2;

int multiprocessors() {
    const char* given = std::getenv("DOUBLE_MULTIPROCESSORS");
    return given ? std::atoi(given) : 4;
}

thread_local int contexts_pushed = 0;
thread_local int capture_mode = 0;  // global: nothing that a capture forbids
thread_local bool capturing = false;
std::mutex one_at_a_time;    // see DOUBLE_SERIAL
std::recursive_mutex mutex;  // guards all that follows
bool initialized = false;
std::set<const void*> alive;                      // modules, streams, events
std::map<const void*, int> event_waits;           // queries until a recorded event has happened
std::map<const void*, uint64_t> event_launches;   // what a recorded event waits for
std::map<const void*, uint64_t> latest_launches;  // by stream
std::map<const void*, std::string> symbols;       // by function
std::map<const void*, size_t> host_bytes;         // of allocations in host memory
uintptr_t next_handle = 0x1000;

struct Captured {
    std::string symbol;
    LaunchConfig config;
    std::string args;
};
std::vector<std::vector<Captured>> graphs;
thread_local std::vector<Captured> capture;

std::string hex_word(const void* place) {
    unsigned long long word = 0;
    std::memcpy(&word, place, sizeof(word));
    char text[2 * sizeof(word) + 1];
    std::snprintf(text, sizeof(text), "%llx", word);
    return text;
}

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

// A call that a capture of this thread forbids, unless it has said that it knows what it does.
Result enter_outside_capture(const char* name) {
    if (capturing && capture_mode != kCaptureRelaxed) return kCaptureUnsupported;
    return enter_in_context(name);
}

#define RETURN_IF_FAILED(...)                                                \
    do {                                                                     \
        if (const Result result = (__VA_ARGS__); result != 0) return result; \
    } while (false)
// Every call begins with this, and then has the stand-in for itself.
#define BEGIN(...)                                      \
    std::unique_lock<std::recursive_mutex> lock(mutex); \
    RETURN_IF_FAILED(__VA_ARGS__)

// Physical memory is a nameless file, so that its descriptor works between processes; mapping is done by replacing
// reserved addresses, which fault while nothing is mapped there.
struct Physical {
    int file;
    size_t bytes;
};
std::map<Allocation, Physical> physical;
std::map<DevicePointer, size_t> reserved, mapped;

// The range that [address, address + bytes) lies in, or the end.
std::map<DevicePointer, size_t>::iterator find_range(std::map<DevicePointer, size_t>& ranges, DevicePointer address,
                                                     size_t bytes) {
    auto range = ranges.upper_bound(address);
    if (range == ranges.begin()) return ranges.end();
    --range;
    return address + bytes <= range->first + range->second ? range : ranges.end();
}
bool anything_mapped(DevicePointer address, size_t bytes) {
    const auto next = mapped.lower_bound(address);
    return (next != mapped.end() && next->first < address + bytes) ||
           (next != mapped.begin() && std::prev(next)->first + std::prev(next)->second > address);
}
bool protect(DevicePointer address, size_t bytes, int protection, int flags, int file) {
    void* place = reinterpret_cast<void*>(address);
    return mmap(place, bytes, protection, flags | MAP_FIXED, file, 0) == place;
}

Result forget(const void* handle) { return alive.erase(handle) == 1 ? kSuccess : kInvalidHandle; }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int double_alive() {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    return static_cast<int>(alive.size() + physical.size() + reserved.size() + mapped.size());
}
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
            *value = multiprocessors();
            return kSuccess;
        case kComputeCapabilityMajor:
            *value = device == 0 ? 9 : 8;
            return kSuccess;
        case kComputeCapabilityMinor:
            *value = 0;
            return kSuccess;
        case kCooperativeLaunch:
        case kCanUseHostPointer:
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
Result cuDevicePrimaryCtxRelease_v2(Device) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    return enter("cuDevicePrimaryCtxRelease", "alive=%d", double_alive());
}
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
    RETURN_IF_FAILED(enter("stream", "flags=%u priority=%d", flags, priority));
    *stream = make<Stream>();
    return kSuccess;
}
Result cuStreamDestroy_v2(Stream stream) {
    BEGIN(enter_in_context("cuStreamDestroy"));
    return forget(stream);
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
    symbols[*function] = symbol;
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
Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** parameters, void** extra) {
    std::unique_lock<std::mutex> turn(one_at_a_time, std::defer_lock);
    if (std::getenv("DOUBLE_SERIAL")) turn.lock();
    BEGIN(enter_in_context("cuLaunchKernelEx"));
    if (extra != nullptr || !alive.count(config->stream)) return kInvalidValue;
    const bool cooperative = config->attribute_count == 1 && config->attributes[0].id == kLaunchCooperative &&
                             config->attributes[0].value.cooperative == 1;
    const unsigned *grid = config->grid, *block = config->block;
    if (grid[0] == 0 || grid[1] == 0 || grid[2] != 1) return kInvalidValue;
    if (uint64_t{grid[0]} * grid[1] > static_cast<unsigned>(multiprocessors() * kBlocksEach)) return kTooLarge;
    const std::string& symbol = symbols[function];
    std::string first_words;
    const void* args = parameters[0];
    if (driver_double::for_ranks(symbol)) {
        // The parameter is the address of an array, which is as long as the grid is high.
        std::memcpy(&args, parameters[0], sizeof(args));
        const auto found = host_bytes.find(args);
        if (found == host_bytes.end() || found->second % grid[1] != 0) return kInvalidValue;
        const size_t each = found->second / grid[1], expected = driver_double::argument_bytes(symbol);
        if (expected != 0 && each != expected) return kInvalidValue;
        first_words = hex_word(&args) + ":";
        for (unsigned rank = 0; rank < grid[1]; ++rank) {
            first_words += (rank ? "," : "") + hex_word(static_cast<const char*>(args) + rank * each);
        }
        if (capturing) return kCaptureUnsupported;
    } else {
        if (grid[1] != 1) return kInvalidValue;
        first_words = hex_word(args);
    }
    if (capturing) {
        const char* bytes = static_cast<const char*>(args);
        capture.push_back({symbol, *config, {bytes, driver_double::argument_bytes(symbol)}});
    } else {
        latest_launches[config->stream] = driver_double::run(symbol, *config, args);
    }
    RETURN_IF_FAILED(enter("launch", "grid=%u,%u,%u block=%u,%u,%u shared=%u cooperative=%d args=%s", grid[0], grid[1],
                           grid[2], block[0], block[1], block[2], config->shared_bytes, cooperative,
                           first_words.c_str()));
    const uint64_t latest = latest_launches[config->stream];
    lock.unlock();  // kernels take their time
    while (turn && !capturing && !driver_double::ended(latest)) continue;
    return kSuccess;
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
    event_launches[event] = latest_launches[stream];
    event_waits[event] = std::getenv("DOUBLE_QUERIES") ? std::atoi(std::getenv("DOUBLE_QUERIES")) : 0;
    return kSuccess;
}
Result cuEventQuery(Event event) {
    BEGIN(enter_outside_capture("cuEventQuery"));
    if (!alive.count(event)) return kInvalidHandle;
    if (event_waits[event]-- > 0) return kNotReady;
    const uint64_t launch = event_launches[event];
    lock.unlock();  // kernels take their time
    return driver_double::ended(launch) ? kSuccess : kNotReady;
}

Result cuStreamIsCapturing(Stream, int* status) {
    BEGIN(enter_in_context("cuStreamIsCapturing"));
    *status = capturing;
    return kSuccess;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return kSuccess;
}
int double_capture(int begin) {
    capturing = begin != 0;
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!capturing) graphs.push_back(std::exchange(capture, {}));
    return static_cast<int>(graphs.size()) - 1;
}
void double_replay(int number) {
    uint64_t latest = 0;
    std::unique_lock<std::recursive_mutex> lock(mutex);
    for (const Captured& launch : graphs.at(static_cast<size_t>(number))) {
        latest = driver_double::run(launch.symbol, launch.config, launch.args.data());
        latest_launches[launch.config.stream] = latest;
    }
    lock.unlock();
    while (!driver_double::ended(latest)) continue;
}
Result cuCtxSynchronize() {
    std::vector<uint64_t> launches;
    {
        BEGIN(enter_outside_capture("cuCtxSynchronize"));
        for (const auto& [stream, launch] : latest_launches) launches.push_back(launch);
    }
    for (const uint64_t launch : launches) {
        while (!driver_double::ended(launch)) continue;
    }
    return kSuccess;
}
Result cuStreamSynchronize(Stream stream) {
    BEGIN(enter_outside_capture("cuStreamSynchronize"));
    return alive.count(stream) ? kSuccess : kInvalidHandle;
}
Result cuMemAlloc_v2(DevicePointer* address, size_t bytes) {
    BEGIN(enter_outside_capture("cuMemAlloc"));
    constexpr size_t kAlignment = 256;
    void* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    std::memset(memory, 0xEE, bytes);  // not zeroed
    alive.insert(memory);
    *address = reinterpret_cast<DevicePointer>(memory);
    return kSuccess;
}
Result cuMemFree_v2(DevicePointer address) {
    BEGIN(enter_in_context("cuMemFree"));
    RETURN_IF_FAILED(forget(reinterpret_cast<void*>(address)));
    std::free(reinterpret_cast<void*>(address));
    return kSuccess;
}
Result cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
    BEGIN(enter_outside_capture("cuMemHostAlloc"));
    if (flags != (kHostPortable | kHostDeviceMap)) return kInvalidValue;
    DevicePointer memory = 0;
    RETURN_IF_FAILED(cuMemAlloc_v2(&memory, bytes));
    *address = reinterpret_cast<void*>(memory);
    host_bytes[*address] = bytes;
    driver_double::share(*address, bytes);
    return kSuccess;
}
Result cuMemFreeHost(void* address) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    host_bytes.erase(address);
    driver_double::unshare(address);
    return cuMemFree_v2(reinterpret_cast<DevicePointer>(address));
}
Result cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
    BEGIN(enter_outside_capture("cuMemHostRegister"));
    if (flags != (kRegisterPortable | kRegisterDeviceMap) || bytes == 0) return kInvalidValue;
    if (!alive.insert(address).second) return kAlreadyRegistered;
    driver_double::share(address, bytes);
    return kSuccess;
}
Result cuMemHostUnregister(void* address) {
    BEGIN(enter_in_context("cuMemHostUnregister"));
    driver_double::unshare(address);
    return forget(address);
}
Result cuMemsetD8Async(DevicePointer address, unsigned char byte, size_t bytes, Stream stream) {
    BEGIN(enter_in_context("cuMemsetD8Async"));
    if (!alive.count(stream)) return kInvalidHandle;
    std::memset(reinterpret_cast<void*>(address), byte, bytes);
    return kSuccess;
}
Result cuMemcpyHtoDAsync_v2(DevicePointer target, const void* source, size_t bytes, Stream stream) {
    BEGIN(enter_in_context("cuMemcpyHtoDAsync"));
    if (!alive.count(stream)) return kInvalidHandle;
    std::memcpy(reinterpret_cast<void*>(target), source, bytes);
    return kSuccess;
}
Result cuMemcpyDtoHAsync_v2(void* target, DevicePointer source, size_t bytes, Stream stream) {
    BEGIN(enter_in_context("cuMemcpyDtoHAsync"));
    if (!alive.count(stream)) return kInvalidHandle;
    std::memcpy(target, reinterpret_cast<const void*>(source), bytes);
    return kSuccess;
}
Result cuMemGetAllocationGranularity(size_t* granularity, const AllocationProperties* properties, int) {
    BEGIN(enter_in_context("cuMemGetAllocationGranularity"));
    if (properties->type != kAllocationPinned || properties->location.type != kLocationDevice) return kInvalidValue;
    *granularity = kGranularity;
    return kSuccess;
}
Result cuMemCreate(Allocation* allocation, size_t bytes, const AllocationProperties* properties, unsigned long long) {
    BEGIN(enter_in_context("cuMemCreate"));
    const char* const largest = std::getenv("DOUBLE_LARGEST");
    if (largest != nullptr && bytes > std::strtoull(largest, nullptr, 10)) return kOutOfMemory;
    if (bytes % kGranularity != 0 || properties->handle_types != kHandleFileDescriptor) return kInvalidValue;
    const int file = memfd_create("double", 0);
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0) return kInvalidValue;
    *allocation = next_handle += 0x10;
    physical[*allocation] = {file, bytes};
    return kSuccess;
}
Result cuMemRelease(Allocation allocation) {
    BEGIN(enter_in_context("cuMemRelease"));
    const auto found = physical.find(allocation);
    if (found == physical.end()) return kInvalidHandle;
    close(found->second.file);
    physical.erase(found);
    return kSuccess;
}
Result cuMemExportToShareableHandle(void* handle, Allocation allocation, int type, unsigned long long) {
    BEGIN(enter_in_context("cuMemExportToShareableHandle"));
    if (type != kHandleFileDescriptor || !physical.count(allocation)) return kInvalidValue;
    *static_cast<int*>(handle) = dup(physical[allocation].file);
    return kSuccess;
}
Result cuMemImportFromShareableHandle(Allocation* allocation, void* handle, int type) {
    BEGIN(enter_in_context("cuMemImportFromShareableHandle"));
    const int file = dup(static_cast<int>(reinterpret_cast<intptr_t>(handle)));
    struct stat status{};
    if (type != kHandleFileDescriptor || file < 0 || fstat(file, &status) != 0) return kInvalidValue;
    *allocation = next_handle += 0x10;
    physical[*allocation] = {file, static_cast<size_t>(status.st_size)};
    return kSuccess;
}
Result cuMemAddressReserve(DevicePointer* address, size_t bytes, size_t, DevicePointer, unsigned long long) {
    BEGIN(enter_in_context("cuMemAddressReserve"));
    if (bytes % kGranularity != 0) return kInvalidValue;
    void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return kInvalidValue;
    *address = reinterpret_cast<DevicePointer>(memory);
    reserved[*address] = bytes;
    return kSuccess;
}
Result cuMemAddressFree(DevicePointer address, size_t bytes) {
    BEGIN(enter_in_context("cuMemAddressFree"));
    if (!reserved.count(address) || reserved[address] != bytes || anything_mapped(address, bytes)) return kInvalidValue;
    munmap(reinterpret_cast<void*>(address), bytes);
    reserved.erase(address);
    return kSuccess;
}
Result cuMemMap(DevicePointer address, size_t bytes, size_t offset, Allocation allocation, unsigned long long) {
    BEGIN(enter_in_context("cuMemMap"));
    if (find_range(reserved, address, bytes) == reserved.end() || anything_mapped(address, bytes)) return kInvalidValue;
    if (address % kGranularity != 0 || offset != 0) return kInvalidValue;
    if (!physical.count(allocation) || physical[allocation].bytes != bytes) return kInvalidValue;
    if (!protect(address, bytes, PROT_NONE, MAP_SHARED, physical[allocation].file)) return kInvalidValue;
    mapped[address] = bytes;
    return kSuccess;
}
Result cuMemUnmap(DevicePointer address, size_t bytes) {
    BEGIN(enter_in_context("cuMemUnmap"));
    if (!mapped.count(address) || mapped[address] != bytes) return kInvalidValue;
    if (!protect(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1)) return kInvalidValue;
    mapped.erase(address);
    return kSuccess;
}
Result cuMemSetAccess(DevicePointer address, size_t bytes, const MemoryAccess* access, size_t count) {
    BEGIN(enter_in_context("cuMemSetAccess"));
    if (!mapped.count(address) || mapped[address] != bytes || count != 1 || access->flags != kAccessReadWrite)
        return kInvalidValue;
    return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}

}  // extern "C"
#pragma GCC visibility pop
