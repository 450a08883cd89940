#include "host/modes/measure/post.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace deep_ep::host::measure {

std::shared_ptr<Call> post(Runtime& runtime, PostArgs posts, unsigned blocks) {
    const wire::HeapLayout heap = Runtime::heap_layout(runtime.options());
    const auto check = [&](const char* name, int rank, uint64_t offset, uint64_t bytes, uint64_t alignment) {
        const uint64_t end = std::min<uint64_t>(heap.bytes(), runtime.heaps()[static_cast<size_t>(rank)]->mapped());
        const bool inside = offset >= heap.arena_offset() && offset <= end && bytes <= end - offset;
        if (inside && offset % alignment == 0) return;
        throw std::invalid_argument(std::string(name) + "=" + std::to_string(offset) + ": expected " +
                                    std::to_string(bytes) + " bytes within an arena, [" +
                                    std::to_string(heap.arena_offset()) + ", " + std::to_string(end) +
                                    "), at a multiple of " + std::to_string(alignment));
    };
    if (posts.to >= static_cast<uint32_t>(runtime.options().ranks)) {
        throw std::invalid_argument("to=" + std::to_string(posts.to) + ": expected 0 to " +
                                    std::to_string(runtime.options().ranks - 1));
    }
    if (runtime.options().routes[posts.to] == fabric::kMapped) {
        throw std::invalid_argument("to=" + std::to_string(posts.to) + ": expected a rank that is not mapped");
    }
    if (posts.posters == 0 || posts.posters > runtime.launcher().warps()) {
        throw std::invalid_argument("posters=" + std::to_string(posts.posters) + ": expected 1 to " +
                                    std::to_string(runtime.launcher().warps()) + ", warps of a block");
    }
    if (posts.bytes % wire::kPieceBytes != 0 || posts.bytes > runtime.max_put_bytes()) {
        throw std::invalid_argument("bytes=" + std::to_string(posts.bytes) + ": expected a multiple of " +
                                    std::to_string(wire::kPieceBytes) + ", at most " +
                                    std::to_string(runtime.max_put_bytes()));
    }
    check("source", runtime.options().rank, posts.source, posts.bytes, wire::kPieceBytes);
    const u64 posters = u64{blocks} * posts.posters;
    const int to = static_cast<int>(posts.to);
    check("target", to, posts.target, posters * posts.bytes, wire::kPieceBytes);
    check("words", to, posts.words, posters * sizeof(u64), sizeof(u64));
    auto call = runtime.open(wire::Kind::kNone);
    runtime.launch<PostKernel>(*call, posts, blocks);
    return call;
}

}  // namespace deep_ep::host::measure
