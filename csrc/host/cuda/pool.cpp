#include "host/cuda/pool.h"

#include <unistd.h>

#include <exception>
#include <map>
#include <mutex>
#include <optional>

namespace deep_ep::host {
namespace {

// Whose a segment is.
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
    static auto* all = new Segments();  // torch frees its last memory when static objects are gone
    return *all;
}

// What peers have not mapped yet is memory like any other until they have: an output there is not offered, as
// Arena::contains tells, and the caller that asked for it takes another (P10). torch keeps what it is given here, and
// hands it out again later, when peers have mapped it.
//
// So where the arena has no room, torch is not given other memory instead, which peers will never see: it would return
// that for every later request of that size, whatever room the arena had. It is told that there is none, and raises
// OutOfMemoryError, without emptying its caches before: inside use_mem_pool it behaves as in a capture. That costs a
// call that is to go in rounds a query of the driver and an exception for each output.
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

// torch calls these from C: an exception ends here, and no memory is what torch raises.
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
