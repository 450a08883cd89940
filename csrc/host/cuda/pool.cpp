#include "host/cuda/pool.h"

#include <unistd.h>

#include <exception>
#include <map>
#include <mutex>
#include <optional>

namespace deep_ep::host {
namespace {

// The origin of a segment.
struct Segment {
    std::shared_ptr<Arena> arena;
    uint64_t offset;
};

thread_local std::shared_ptr<Arena> current;
thread_local bool current_grows = false;

struct Segments {
    std::mutex mutex;
    std::map<void*, Segment> by_address;
};
Segments& segments() {
    static auto* all = new Segments();  // torch frees its last memory after static objects are destroyed
    return *all;
}

// Memory that peers have not mapped yet is ordinary memory until they have: Arena::contains prevents an output there
// from being offered, and the caller that requested it takes another one (P10). torch keeps the memory that it gets
// here and hands it out again later, when peers have mapped it.
//
// Therefore, if the arena has no room, torch gets no substitute memory that peers will never see: it would return that
// memory for every later request of that size, whatever room the arena has by then. Instead the allocation fails, and
// torch raises OutOfMemoryError. It does not empty its caches first, since inside use_mem_pool it behaves as in a
// capture. For a call that must go in rounds this costs one query of the driver and one exception per output.
std::optional<uint64_t> allocate_in(Arena& arena, size_t bytes, bool grows) {
    return grows ? arena.allocate_ahead(bytes) : arena.allocate(bytes);
}

}  // namespace

PoolOver::PoolOver(std::shared_ptr<Arena> arena, bool grows) {
    current = std::move(arena);
    current_grows = grows;
}
PoolOver::~PoolOver() { current.reset(); }

}  // namespace deep_ep::host

using namespace deep_ep::host;

// torch calls these from C: exceptions must not pass, and torch raises its own error if there is no memory.
void* deep_ep_pool_allocate(ssize_t bytes, int, void*) {
    if (!current) return nullptr;
    try {
        const auto offset = allocate_in(*current, static_cast<size_t>(bytes), current_grows);
        if (!offset) return nullptr;
        void* address = current->address(*offset);
        const std::lock_guard<std::mutex> guard(segments().mutex);
        segments().by_address[address] = {current, *offset};
        return address;
    } catch (const std::exception&) {
        return nullptr;
    }
}

void deep_ep_pool_free(void* address, ssize_t, int, void*) {
    Segment segment;
    {
        const std::lock_guard<std::mutex> guard(segments().mutex);
        const auto found = segments().by_address.find(address);
        if (found == segments().by_address.end()) return;
        segment = std::move(found->second);
        segments().by_address.erase(found);
    }
    segment.arena->release(segment.offset);
}
