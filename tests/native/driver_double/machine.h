// The machine's GPUs, as the environment describes them to the stand-ins for libcuda.so.1 and libnvidia-ml.so.1.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace driver_double {

inline int number(const char* variable, int otherwise) {
    const char* given = std::getenv(variable);
    return given ? std::atoi(given) : otherwise;
}
inline bool flag(const char* variable) { return std::getenv(variable) != nullptr; }

// How many GPUs this process sees, and how many the machine has.
inline int devices() { return number("DOUBLE_DEVICES", 2); }
inline int gpus_of_machine() { return number("DOUBLE_MACHINE", devices()); }
inline int gpu_of_machine(int device) { return (device + number("DOUBLE_FIRST_GPU", 0)) % gpus_of_machine(); }

struct GpuName {
    char bytes[16];
};
// The UUID of a GPU, or of its instance.
inline GpuName name_of_gpu(int gpu, bool instance) {
    GpuName name{};
    const char* const host = std::getenv("DOUBLE_HOST");
    const char* const kind = instance ? "instance" : host ? host : "double";
    std::snprintf(name.bytes, sizeof(name.bytes), "%s %u", kind, static_cast<unsigned>(gpu) % 1000);
    return name;
}

// How kernels on one GPU access the memory of another.
inline bool of_different_parity(int gpu, int other) { return (gpu + other) % 2 != 0; }
inline bool has_access(int from, int to) {
    if (from != to && flag("DOUBLE_INSTANCES")) return false;
    if (!of_different_parity(from, to)) return true;
    return !flag("DOUBLE_APART") && !(flag("DOUBLE_ONE_WAY") && from > to);
}
inline bool has_native_atomics(int from, int to) {
    return has_access(from, to) && !(of_different_parity(from, to) && flag("DOUBLE_PCIE"));
}

}  // namespace driver_double
