// What the files of the stand-in for the driver share: its state, and how each call begins.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

#include "host/cuda/driver_types.h"

namespace driver_double {

using namespace deep_ep::host::cuda;

constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidImage = 200, kInvalidPtx = 218,
                 kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kAlreadyRegistered = 712,
                 kTooLarge = 720, kInvalidDevice = 101, kCaptureUnsupported = 900;
constexpr int kBlocksEach = 2;

int multiprocessors();
int devices();
int gpu_of_machine(Device device);

inline thread_local std::vector<Device> contexts;  // the last is current
inline thread_local int capture_mode = 0;          // global: nothing that a capture forbids
inline thread_local bool capturing = false;
inline std::recursive_mutex mutex;  // guards all that follows, and what else the files keep
inline bool initialized = false;
inline bool shut_down = false;  // with the end of the process
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
// Of physical memory, and of addresses: what has been made and not given back.
int alive_heaps();

// A line in the log, and the error that a test asks this call for.
__attribute__((format(printf, 2, 3))) Result enter(const char* name, const char* format, ...);
inline Result enter(const char* name) { return enter(name, "%s", ""); }
Result enter_in_context(const char* name);
// A call that a capture of this thread forbids, unless it has said that it knows what it does.
Result enter_outside_capture(const char* name);

// The driver waits for the whole device, and meanwhile lets no other call in.
void wait_for_kernels();

#define RETURN_IF_FAILED(...)                                                \
    do {                                                                     \
        if (const Result result = (__VA_ARGS__); result != 0) return result; \
    } while (false)
// Every call begins with this, and then has the stand-in for itself.
#define BEGIN(...)                                      \
    std::unique_lock<std::recursive_mutex> lock(mutex); \
    RETURN_IF_FAILED(__VA_ARGS__)

}  // namespace driver_double
