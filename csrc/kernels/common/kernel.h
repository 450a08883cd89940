// How a kernel is launched. Beside each kernel stands a type that says so:
//
//   kName           what launchers and errors call it
//   Args            its only parameter; has a `shape`, or the type says kOfAnyShape
//   kEntry<Shape>   the instantiation
//   shared_bytes()  dynamic shared memory of a block; the kernel cuts it up by the same computation
#pragma once

#include "wire/types.h"

namespace deep_ep {

// What the shared memory of a block depends on.
struct BlockSizes {
    u32 ranks;
    u32 experts;  // of all ranks; 0 for kernels that keep nothing for each
    u32 topk;     // as compiled for; 0 for kernels of any shape
    u32 warps;
    u32 copies_bytes;  // device::RowCopies::kSharedBytes of the target that runs the kernel
    u32 per_node = 1;  // ranks of a node, for kernels that keep something for each
};

// An array in the shared memory of a block.
template <class T>
struct SharedArray {
    u32 begin;

    constexpr T* in(u8* shared) const { return reinterpret_cast<T*>(shared + begin); }
};

// Arrays one behind the other.
class SharedCut {
  public:
    template <class T>
    constexpr SharedArray<T> take(u32 count) {
        const u32 begin = (end_ + alignof(T) - 1) / alignof(T) * alignof(T);
        end_ = begin + count * static_cast<u32>(sizeof(T));
        return {begin};
    }
    constexpr u32 end() const { return end_; }

  private:
    u32 end_ = 0;
};

// For kernels without dynamic shared memory.
struct NoSharedMemory {
    static constexpr u32 shared_bytes(const BlockSizes&) { return 0; }
};

}  // namespace deep_ep
