#include "gpu.h"

#include <dlfcn.h>

#include "settings.h"

namespace nvshmem_double {
namespace {

namespace cuda = deep_ep::host::cuda;
using cuda::DevicePointer, cuda::Result, cuda::Stream;

constexpr Result kInvalidHandle = 400, kNotFound = 500;

// Never closed, as in NVSHMEM.
void* library() {
    static void* const opened = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return opened;
}

template <class... Arguments>
Result call_unchecked(const char* name, Arguments... arguments) {
    void* const function = library() ? dlsym(library(), name) : nullptr;
    if (function == nullptr) throw Failure(kInternal, std::string("the CUDA driver has no ") + name);
    return reinterpret_cast<Result (*)(Arguments...)>(function)(arguments...);
}
template <class... Arguments>
void call(const char* name, Arguments... arguments) {
    if (const Result result = call_unchecked(name, arguments...); result != 0) {
        throw Failure(kInternal, std::string(name) + " has failed: " + std::to_string(result));
    }
}

// Information that a real driver would have without being told.
void tell(const char* name, uint64_t address, uint64_t bytes) {
    void* const function = dlsym(library(), name);
    if (function == nullptr) throw Failure(kInternal, "libcuda.so.1 is not the stand-in");
    reinterpret_cast<void (*)(const void*, size_t)>(function)(reinterpret_cast<const void*>(address), bytes);
}

}  // namespace

class Gpu::Current {
  public:
    explicit Current(Context context) { call("cuCtxPushCurrent_v2", context); }
    ~Current() {
        Context popped = nullptr;
        call_unchecked("cuCtxPopCurrent_v2", &popped);
    }
};

Gpu::Context Gpu::current_context() {
    Context context = nullptr;
    if (library() == nullptr || call_unchecked("cuCtxGetCurrent", &context) != 0) return nullptr;
    return context;
}

Gpu::Gpu(Context context) : context_(context) {
    const Current current(context_);
    call("cuStreamCreateWithPriority", &stream_, unsigned{cuda::kStreamNonBlocking}, 0);
}

Gpu::~Gpu() {
    try {
        const Current current(context_);
        for (const uint64_t address : shared_) {
            call_unchecked("double_unshare", reinterpret_cast<const void*>(address));
        }
        for (const uint64_t address : owned_) {
            call_unchecked("double_disown", reinterpret_cast<const void*>(address));
        }
        for (const uint64_t address : allocated_) call("cuMemFree_v2", DevicePointer{address});
        for (void* address : on_host_) call("cuMemFreeHost", address);
        call("cuStreamDestroy_v2", stream_);
    } catch (const Failure& failure) {
        complain(failure.what());
    }
}

uint64_t Gpu::allocate(uint64_t bytes) {
    const Current current(context_);
    DevicePointer address = 0;
    call("cuMemAlloc_v2", &address, size_t{bytes});
    return *allocated_.insert(address).first;
}

void Gpu::free(uint64_t address) {
    const Current current(context_);
    allocated_.erase(address);
    call("cuMemFree_v2", DevicePointer{address});
}

void* Gpu::allocate_on_host(uint64_t bytes) {
    const Current current(context_);
    void* address = nullptr;
    call("cuMemHostAlloc", &address, size_t{bytes}, unsigned{cuda::kHostPortable | cuda::kHostDeviceMap});
    return *on_host_.insert(address).first;
}

void Gpu::write(uint64_t address, const void* bytes, uint64_t count) {
    const Current current(context_);
    call("cuMemcpyHtoDAsync_v2", DevicePointer{address}, bytes, size_t{count}, stream_);
    call("cuStreamSynchronize", stream_);
}

void Gpu::read(uint64_t address, void* bytes, uint64_t count) {
    const Current current(context_);
    call("cuMemcpyDtoHAsync_v2", bytes, DevicePointer{address}, size_t{count}, stream_);
    call("cuStreamSynchronize", stream_);
}

bool Gpu::find_global(void* module, const char* name, Global& found) {
    const Current current(context_);
    DevicePointer address = 0;
    size_t bytes = 0;
    const Result result =
        call_unchecked("cuModuleGetGlobal_v2", &address, &bytes, static_cast<cuda::Module>(module), name);
    if (result == kNotFound) return false;
    if (result == kInvalidHandle) throw Failure(kInvalidValue, "the driver knows no such module");
    if (result != 0) throw Failure(kInternal, "cuModuleGetGlobal has failed: " + std::to_string(result));
    found = {address, bytes};
    return true;
}

void Gpu::share(uint64_t address, uint64_t bytes) {
    tell("double_share", address, bytes);
    shared_.insert(address);
}

void Gpu::own(uint64_t address, uint64_t bytes) {
    const Current current(context_);
    tell("double_own", address, bytes);
    owned_.insert(address);
}

}  // namespace nvshmem_double
