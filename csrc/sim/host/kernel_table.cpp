#include "sim/host/kernel_table.h"

#include <stdexcept>
#include <string>

#include "kernels/registry.h"
#include "sim/host/kernel_source.h"

namespace deep_ep::host {
namespace {

template <class Kernel>
void call(const void* args) {
    Kernel::template kEntry<RuntimeShape>(*static_cast<const typename Kernel::Args*>(args));
}

}  // namespace

cpu::Entry find_kernel(const char* name) {
    cpu::Entry found = nullptr;
    AllKernels::each([&]<class Kernel>(Kernel) {
        if (std::string(Kernel::kName) == name) found = call<Kernel>;
    });
    if (found == nullptr) {
        throw std::out_of_range(std::string("no kernel named ") + name + " in csrc/kernels/registry.h");
    }
    return found;
}

void CompiledKernels::find(cpu::Launch& launch, const RuntimeShape&, std::string&) const {
    launch.entry = find_kernel(launch.name);
}

uint32_t CompiledKernels::copies_bytes() const { return device::RowCopies::kSharedBytes; }

}  // namespace deep_ep::host
