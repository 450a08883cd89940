// The driver's calls as NVSHMEM makes them: libcuda.so.1 is opened when a device is first needed, and every call is
// made with the context current that initialisation has found.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "host/cuda/driver_types.h"

namespace nvshmem_double {

class Gpu {
  public:
    using Context = deep_ep::host::cuda::Context;

    // Of the calling thread; null where there is none, or no driver.
    static Context current_context();

    explicit Gpu(Context context);
    ~Gpu();
    Gpu(const Gpu&) = delete;
    Gpu& operator=(const Gpu&) = delete;

    uint64_t allocate(uint64_t bytes);
    void free(uint64_t address);
    // Host memory that kernels reach under its address.
    void* allocate_on_host(uint64_t bytes);
    void write(uint64_t address, const void* bytes, uint64_t count);
    void read(uint64_t address, void* bytes, uint64_t count);

    struct Global {
        uint64_t address, bytes;
    };
    // A module's variable; none where the module has none of that name. Throws Failure where there is no such module.
    bool find_global(void* module, const char* name, Global& found);

    // Tells the stand-in for the driver that a NIC uses this device memory, too.
    void share(uint64_t address, uint64_t bytes);
    // And that memory which is not allocated by it is this GPU's.
    void own(uint64_t address, uint64_t bytes);

  private:
    class Current;

    const Context context_;
    deep_ep::host::cuda::Stream stream_ = nullptr;
    std::set<uint64_t> allocated_;
    std::set<void*> on_host_;
    std::set<uint64_t> shared_;
    std::set<uint64_t> owned_;
};

}  // namespace nvshmem_double
