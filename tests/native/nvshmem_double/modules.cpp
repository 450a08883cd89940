#include "modules.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "settings.h"

namespace nvshmem_double {
namespace {

constexpr const char* kVersion = "nvshmemi_device_lib_version_d";
constexpr const char* kDeviceState = "nvshmemi_device_state_d";
constexpr const char* kIbgdaState = "nvshmemi_ibgda_device_state_d";
// Size in the oldest device library: a smaller symbol is not NVSHMEM's.
constexpr uint64_t kMinDeviceState = 776;
// From this minor version on, the host library queries the symbol's size. Before, it copies its entire state.
constexpr int kAsksSince = 7;

void check_version(const Golden& golden, Gpu& gpu, void* module) {
    Gpu::Global found{};
    if (!gpu.find_global(module, kVersion, found)) {
        throw Failure(kInvalidValue, std::string("the module has no ") + kVersion);
    }
    int version[3] = {};
    if (found.bytes != sizeof(version)) {
        throw Failure(kInvalidValue, std::string(kVersion) + " has " + std::to_string(found.bytes) + " bytes, not 12");
    }
    gpu.read(found.address, version, sizeof(version));
    if (version[0] == golden.major() && version[1] <= golden.minor()) return;
    throw Failure(kInvalidValue, "the module is for version " + std::to_string(version[0]) + "." +
                                     std::to_string(version[1]) + ", the host library is " +
                                     std::to_string(golden.major()) + "." + std::to_string(golden.minor()));
}

void check_bytes(const char* name, const Gpu::Global& found, uint64_t least) {
    if (found.bytes < least) {
        throw Failure(kInvalidValue, std::string(name) + " has " + std::to_string(found.bytes) +
                                         " bytes, fewer than the " + std::to_string(least) + " that are copied");
    }
}

}  // namespace

void Modules::add(const Golden& golden, Gpu& gpu, void* module) {
    check_version(golden, gpu, module);
    Gpu::Global found{};
    if (!gpu.find_global(module, kDeviceState, found)) {
        throw Failure(kInvalidValue, std::string("the module has no ") + kDeviceState);
    }
    check_bytes(kDeviceState, found, golden.is_at_least(kAsksSince) ? kMinDeviceState : golden.number("DeviceState"));
    if (gpu.find_global(module, kIbgdaState, found)) check_bytes(kIbgdaState, found, golden.number("IbgdaState"));
    if (std::find(modules_.begin(), modules_.end(), module) == modules_.end()) modules_.push_back(module);
}

void Modules::remove(void* module) {
    const auto found = std::find(modules_.begin(), modules_.end(), module);
    if (found == modules_.end()) throw Failure(kInvalidValue, "the module is not registered");
    modules_.erase(found);
}

void Modules::copy(const Golden& golden, Gpu& gpu, const Bytes& device, const Bytes* ibgda) const {
    std::string wrong;
    for (void* module : modules_) {
        try {
            Gpu::Global found{};
            const uint64_t most = golden.is_at_least(kAsksSince) ? ~0ull : device.size();
            if (!gpu.find_global(module, kDeviceState, found))
                throw Failure(kInternal, "the state's symbol has disappeared");
            gpu.write(found.address, device.data(), std::min({found.bytes, most, uint64_t{device.size()}}));
            if (ibgda == nullptr || !gpu.find_global(module, kIbgdaState, found)) continue;
            gpu.write(found.address, ibgda->data(), ibgda->size());
        } catch (const Failure& failure) {
            wrong = failure.what();
        }
    }
    if (wrong.empty()) return;
    throw Failure(kInternal, "states cannot be copied to a module that is registered (" + wrong +
                                 "): it was unloaded before nvshmemx_cumodule_finalize");
}

}  // namespace nvshmem_double
