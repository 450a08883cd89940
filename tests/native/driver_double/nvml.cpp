// A stand-in for libnvidia-ml.so.1, beside the one for the driver and by the same variables; it fails on demand:
//
//   DOUBLE_NVML_FAIL   "nvmlInit_v2=9": that call returns that error
//   DOUBLE_NVML_HIDES  it shows only the GPUs that this process sees, as in a container
#include <cstring>
#include <string>

#include "machine.h"

using namespace driver_double;

namespace {

constexpr int kOk = 0, kUninitialized = 1, kInvalidArgument = 2, kNotFound = 6;
constexpr int kRead = 0, kWrite = 1, kAtomics = 3;  // nvmlGpuP2PCapsIndex_t
constexpr int kNotSupported = 5;                    // nvmlGpuP2PStatus_t
constexpr uintptr_t kInstances = 0x1000;            // handles from here on are those of instances

bool initialized = false;

int enter(const char* name) {
    const std::string fail = std::getenv("DOUBLE_NVML_FAIL") ? std::getenv("DOUBLE_NVML_FAIL") : "";
    const size_t at = fail.find('=');
    if (at != std::string::npos && fail.substr(0, at) == name) return std::atoi(fail.c_str() + at + 1);
    return initialized || std::strcmp(name, "nvmlInit_v2") == 0 ? kOk : kUninitialized;
}

int shown() { return flag("DOUBLE_NVML_HIDES") ? devices() : gpus_of_machine(); }
int gpu_of(int index) { return flag("DOUBLE_NVML_HIDES") ? gpu_of_machine(index) : index; }

std::string text_of(const char* kind, const GpuName& name) {
    std::string text = kind;
    for (int at = 0; at < 16; ++at) {
        char digits[4];
        const bool dash = at == 4 || at == 6 || at == 8 || at == 10;
        std::snprintf(digits, sizeof(digits), "%s%02x", dash ? "-" : "", static_cast<unsigned char>(name.bytes[at]));
        text += digits;
    }
    return text;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int nvmlInit_v2() {
    const int result = enter("nvmlInit_v2");
    initialized = result == kOk;
    return result;
}
const char* nvmlErrorString(int result) { return result == kNotFound ? "Not Found" : "Some Error"; }
int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = static_cast<unsigned>(shown());
    return enter("nvmlDeviceGetCount_v2");
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
    if (index >= static_cast<unsigned>(shown())) return kInvalidArgument;
    *handle = reinterpret_cast<void*>(static_cast<uintptr_t>(gpu_of(static_cast<int>(index)) + 1));
    return enter("nvmlDeviceGetHandleByIndex_v2");
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
    if (const int result = enter("nvmlDeviceGetHandleByUUID"); result != kOk) return result;
    for (int index = 0; index < shown(); ++index) {
        const auto gpu = static_cast<uintptr_t>(gpu_of(index));
        const bool whole = uuid == text_of("GPU-", name_of_gpu(static_cast<int>(gpu), false));
        const bool instance =
            flag("DOUBLE_INSTANCES") && uuid == text_of("MIG-", name_of_gpu(static_cast<int>(gpu), true));
        if (!whole && !instance) continue;
        *handle = reinterpret_cast<void*>(gpu + (instance ? kInstances : 1));
        return kOk;
    }
    return kNotFound;
}
int nvmlDeviceGetP2PStatus(void* device, void* peer, int which, int* status) {
    if (const int result = enter("nvmlDeviceGetP2PStatus"); result != kOk) return result;
    const auto from = reinterpret_cast<uintptr_t>(device), to = reinterpret_cast<uintptr_t>(peer);
    if (from == to || from >= kInstances || to >= kInstances) return kInvalidArgument;
    if (which != kRead && which != kWrite && which != kAtomics) return kInvalidArgument;
    const int one = static_cast<int>(from) - 1, other = static_cast<int>(to) - 1;
    const bool can = which == kAtomics ? has_native_atomics(one, other) : has_access(one, other);
    *status = can ? kOk : kNotSupported;
    return kOk;
}

}  // extern "C"
#pragma GCC visibility pop
