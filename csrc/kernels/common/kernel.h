// How a kernel is launched. Each kernel has a companion type with:
//
//   kName           its name in launchers and errors
//   Args            its only parameter; has a `shape`, unless the type sets kOfAnyShape
//   kEntry<Shape>   the instantiation
//   shared_bytes()  dynamic shared memory of a block; the kernel partitions it by the same computation
//   kFewerWarps     optional: its blocks have fewer warps where shared memory does not suffice for the usual number
#pragma once

#include "wire/types.h"

namespace deep_ep {

// The sizes that determine a block's shared memory.
struct BlockSizes {
    u32 ranks;
    u32 experts;  // of all ranks; 0 for kernels without per-expert state
    u32 topk;     // compile-time value; 0 for kernels of any shape
    u32 warps;
    u32 copies_bytes;  // device::RowCopies::kSharedBytes of the target that runs the kernel
    u32 per_node = 1;  // ranks per node, for kernels with per-node state
};

// An array in the shared memory of a block.
template <class T>
struct SharedArray {
    u32 begin;

    constexpr T* in(u8* shared) const { return reinterpret_cast<T*>(shared + begin); }
};

// Lays out arrays one after another.
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
