// Memory for a torch.cuda.MemPool: segments of a Buffer's arena, which peers see or will see. What goes where within a
// segment, and when it may be used again, is torch's allocator's to say.
#pragma once

#include <memory>

#include "host/heap/arena.h"

namespace deep_ep::host {

// While one lives, what this thread's pool needs comes from that arena, which may grow by it. They do not nest; without
// one there is no memory.
class PoolOver {
  public:
    PoolOver(std::shared_ptr<Arena> arena, bool grows);
    ~PoolOver();
    PoolOver(const PoolOver&) = delete;
    PoolOver& operator=(const PoolOver&) = delete;
};

}  // namespace deep_ep::host

// What torch.cuda.memory.CUDAPluggableAllocator looks up by name. A segment outlives its Buffer if tensors in it do.
extern "C" {
__attribute__((visibility("default"))) void* deep_ep_pool_allocate(ssize_t bytes, int device, void* stream);
__attribute__((visibility("default"))) void deep_ep_pool_free(void* address, ssize_t bytes, int device, void* stream);
}
