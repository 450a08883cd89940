// Tensors in an arena as DLPack capsules, an exchange format that torch reads and that does not need torch's headers
// here. Layout: DLPack 0.8 (dmlc/dlpack, include/dlpack/dlpack.h), the unversioned structs that torch.from_dlpack
// accepts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "host/heap/arena.h"

namespace deep_ep::host {

struct DLDevice {
    int32_t type;  // 1: CPU, 2: CUDA
    int32_t id;
};
struct DLDataType {
    uint8_t code;  // 0 int, 1 unsigned, 2 float, 4 bfloat, 6 bool
    uint8_t bits;
    uint16_t lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;  // null: compact, row-major
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor tensor;
    void* manager;
    void (*deleter)(DLManagedTensor*);
};
static_assert(sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64, "DLPack's C structs");

// Makes a tensor that returns its memory to the arena when its consumer deletes it, on any thread and without the GIL.
// Returns null if the arena is full.
DLManagedTensor* make_tensor(const std::shared_ptr<Arena>& arena, const std::vector<int64_t>& shape, DLDataType dtype,
                             DLDevice device);

}  // namespace deep_ep::host
