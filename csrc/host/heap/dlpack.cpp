#include "host/heap/dlpack.h"

namespace deep_ep::host {
namespace {

struct ArenaTensor {
    DLManagedTensor managed;
    std::shared_ptr<Arena> arena;
    uint64_t offset;
    std::vector<int64_t> shape;
};

void release(DLManagedTensor* managed) {
    auto* tensor = static_cast<ArenaTensor*>(managed->manager);
    tensor->arena->release(tensor->offset);
    delete tensor;
}

}  // namespace

DLManagedTensor* make_tensor(const std::shared_ptr<Arena>& arena, const std::vector<int64_t>& shape, DLDataType dtype,
                             DLDevice device) {
    uint64_t bytes = dtype.bits / 8;
    for (const int64_t extent : shape) bytes *= static_cast<uint64_t>(extent);
    const auto offset = arena->allocate(bytes);
    if (!offset) return nullptr;
    auto* tensor = new ArenaTensor{{}, arena, *offset, shape};
    tensor->managed.tensor = {
        arena->address(*offset), device, static_cast<int32_t>(shape.size()), dtype, tensor->shape.data(), nullptr, 0};
    tensor->managed.manager = tensor;
    tensor->managed.deleter = release;
    return &tensor->managed;
}

}  // namespace deep_ep::host
