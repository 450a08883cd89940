// State shared by the files of the stand-in for the driver, and the common beginning of each call.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

#include "host/cuda/driver_types.h"
#include "machine.h"

namespace driver_double {

using namespace deep_ep::host::cuda;

constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidImage = 200, kInvalidPtx = 218,
                 kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kAlreadyRegistered = 712,
                 kTooLarge = 720, kInvalidDevice = 101, kCaptureUnsupported = 900, kCaptureIsolation = 905,
                 kCapturedEvent = 907, kPeersUnsupported = 217;
constexpr int kBlocksEach = 2;

int multiprocessors();

inline thread_local std::vector<Device> contexts;  // the last is current
inline thread_local int capture_mode = 0;          // global: forbids nothing during a capture
inline thread_local bool capturing = false;
inline std::recursive_mutex mutex;  // guards everything below, and the state in the other files
inline bool initialized = false;
inline bool shut_down = false;  // at the end of the process
inline int hardware_queues = 8;
inline std::set<const void*> alive;  // modules, streams, events, memory
inline uintptr_t next_handle = 0x1000;

template <class Handle>
Handle make() {
    auto* handle = reinterpret_cast<Handle>(next_handle += 0x10);
    alive.insert(handle);
    return handle;
}
inline Result forget(const void* handle) { return alive.erase(handle) == 1 ? kSuccess : kInvalidHandle; }
// Pieces of physical memory and address ranges that have been created and not yet released.
int alive_heaps();

// Adds a line to the log. Returns the error that a test wants from this call.
__attribute__((format(printf, 2, 3))) Result enter(const char* name, const char* format, ...);
inline Result enter(const char* name) { return enter(name, "%s", ""); }
Result enter_in_context(const char* name);
// For a call that is forbidden during a capture of this thread, unless the capture mode allows it.
Result enter_outside_capture(const char* name);

// The driver waits for the whole device, and meanwhile lets no other call in.
void wait_for_kernels();

#define RETURN_IF_FAILED(...)                                                \
    do {                                                                     \
        if (const Result result = (__VA_ARGS__); result != 0) return result; \
    } while (false)
// Begins every call, and takes the lock of the stand-in.
#define BEGIN(...)                                      \
    std::unique_lock<std::recursive_mutex> lock(mutex); \
    RETURN_IF_FAILED(__VA_ARGS__)

}  // namespace driver_double
