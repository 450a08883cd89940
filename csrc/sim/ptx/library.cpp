#include "sim/ptx/library.h"

namespace deep_ep::ptx {

void Library::add(const std::string& name, const Shape& shape, std::string symbol, std::shared_ptr<const Image> image) {
    image->module().function(symbol);  // throws if there is none
    kernels_.insert_or_assign({name, shape}, Kernel{std::move(symbol), std::move(image)});
}

void Library::find(cpu::Launch& launch, const Shape& shape, std::string& held) const {
    auto found = kernels_.find({launch.name, shape});
    if (found == kernels_.end()) found = kernels_.find({launch.name, Shape{}});
    if (found == kernels_.end()) throw PtxError(std::string("no PTX is loaded for ") + launch.name);
    prepare(launch, held, *found->second.image, found->second.symbol, {static_cast<u32>(launch.rank), 0});
}

}  // namespace deep_ep::ptx
