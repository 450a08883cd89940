// Memory for a torch.cuda.MemPool: segments of a Buffer's arena, which peers can access or will be able to. torch's
// allocator decides about placement within a segment and about reuse.
#pragma once

#include <memory>

#include "host/heap/arena.h"

namespace deep_ep::host {

// While a PoolOver lives, the allocations of this thread's pool come from its arena, which may grow. PoolOvers do not
// nest; without one there is no memory.
class PoolOver {
  public:
    PoolOver(std::shared_ptr<Arena> arena, bool grows);
    ~PoolOver();
    PoolOver(const PoolOver&) = delete;
    PoolOver& operator=(const PoolOver&) = delete;
};

}  // namespace deep_ep::host

// torch.cuda.memory.CUDAPluggableAllocator looks these up by name. A segment outlives its Buffer if tensors in it do.
extern "C" {
__attribute__((visibility("default"))) void* deep_ep_pool_allocate(ssize_t bytes, int device, void* stream);
__attribute__((visibility("default"))) void deep_ep_pool_free(void* address, ssize_t bytes, int device, void* stream);
}
