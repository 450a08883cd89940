// The driver's calls as NVSHMEM makes them: libcuda.so.1 is opened when a device is first needed, and every call is
// made with the context current that initialization found.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "host/cuda/driver_types.h"

namespace nvshmem_double {

class Gpu {
  public:
    using Context = deep_ep::host::cuda::Context;

    // The calling thread's context; null if there is none, or no driver.
    static Context current_context();

    explicit Gpu(Context context);
    ~Gpu();
    Gpu(const Gpu&) = delete;
    Gpu& operator=(const Gpu&) = delete;

    uint64_t allocate(uint64_t bytes);
    void free(uint64_t address);
    // Host memory that kernels can access at its host address.
    void* allocate_on_host(uint64_t bytes);
    void write(uint64_t address, const void* bytes, uint64_t count);
    void read(uint64_t address, void* bytes, uint64_t count);

    struct Global {
        uint64_t address, bytes;
    };
    // Finds a module's variable; false if the module has none of that name. Throws Failure if there is no such module.
    bool find_global(void* module, const char* name, Global& found);

    // Informs the stand-in for the driver that a NIC also uses this device memory.
    void share(uint64_t address, uint64_t bytes);
    // Informs it that memory which it has not allocated belongs to this GPU.
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
