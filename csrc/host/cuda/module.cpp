#include "host/cuda/module.h"

#include "host/cuda/memory.h"

namespace deep_ep::host::cuda {

LoadedModule::LoadedModule(std::shared_ptr<const PrimaryContext> context, const std::string& image)
    : context_(std::move(context)) {
    const PrimaryContext::Current current(*context_);
    Driver::get().check(Driver::get().module_load(&module_, image.data()), "loading a module");
}

LoadedModule::~LoadedModule() {
    const PrimaryContext::Current current(*context_, std::nothrow);
    if (current) Driver::get().module_unload(module_);
}

std::vector<uint8_t> LoadedModule::read(const std::string& symbol) const {
    DevicePointer address = 0;
    size_t bytes = 0;
    {
        const PrimaryContext::Current current(*context_);
        Driver::get().check(Driver::get().module_global(&address, &bytes, module_, symbol.c_str()),
                            "finding " + symbol + " in a module");
    }
    std::vector<uint8_t> held(bytes);
    CudaMemory(context_).read(held.data(), reinterpret_cast<const void*>(address), bytes);
    return held;
}

}  // namespace deep_ep::host::cuda
