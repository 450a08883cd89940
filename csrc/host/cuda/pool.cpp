#include "host/cuda/pool.h"

#include <unistd.h>

#include <map>
#include <mutex>

#include "host/cuda/driver.h"

namespace deep_ep::host {
namespace {

using cuda::DevicePointer;
using cuda::Driver;
using cuda::PrimaryContext;

// Whose a segment is: of an arena, or plain memory of a device.
struct Segment {
    std::shared_ptr<Arena> arena;
    uint64_t offset;
    std::shared_ptr<const PrimaryContext> context;
};

thread_local std::shared_ptr<Arena> current;

struct Segments {
    std::mutex mutex;
    std::map<void*, Segment> by_address;
};
Segments& segments() {
    static auto* all = new Segments();  // torch frees its last memory when static objects are gone
    return *all;
}

void* allocate_plain(size_t bytes, int device) {
    const auto context = std::make_shared<const PrimaryContext>(device);
    const PrimaryContext::Current here(*context);
    DevicePointer address = 0;
    Driver::get().check(Driver::get().memory_allocate(&address, bytes), "an allocation beside the arena");
    auto* memory = reinterpret_cast<void*>(address);
    const std::lock_guard<std::mutex> guard(segments().mutex);
    segments().by_address[memory] = {nullptr, 0, context};
    return memory;
}

// What peers have not mapped yet is memory like any other until they have: an output there is not offered, as
// Arena::contains tells, and whoever asked for it takes another (P10). torch keeps what it is given here, and hands it
// out again later: so it had better be what peers will see by then than plain memory, which they never will.
std::optional<uint64_t> allocate_in(Arena& arena, size_t bytes) {
    if (const auto offset = arena.allocate(bytes)) return offset;
    try {
        return arena.allocate_ahead(bytes);
    } catch (const cuda::CudaError&) {
        return std::nullopt;  // the GPU's memory is full, but perhaps for less
    }
}

}  // namespace

PoolOver::PoolOver(std::shared_ptr<Arena> arena) { current = std::move(arena); }
PoolOver::~PoolOver() { current.reset(); }

}  // namespace deep_ep::host

using namespace deep_ep::host;

// torch calls these from C: an exception ends here, and no memory is what torch raises.
void* deep_ep_pool_allocate(ssize_t bytes, int device, void*) {
    try {
        const auto size = static_cast<size_t>(bytes);
        const auto offset = current ? allocate_in(*current, size) : std::nullopt;
        if (!offset) return allocate_plain(size, device);
        void* address = current->address(*offset);
        const std::lock_guard<std::mutex> guard(segments().mutex);
        segments().by_address[address] = {current, *offset, nullptr};
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
    if (segment.arena) {
        segment.arena->release(segment.offset);
    } else {
        const PrimaryContext::Current here(*segment.context);
        Driver::get().memory_free(reinterpret_cast<DevicePointer>(address));
    }
}
