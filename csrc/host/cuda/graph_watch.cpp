#include "host/cuda/graph_watch.h"

#include <memory>

namespace deep_ep::host {
namespace {

using Flag = std::shared_ptr<std::atomic<bool>>;

// Called by a thread of the driver. The driver must not be called from here.
void note_gone(void* flag) {
    const std::unique_ptr<Flag> owned(static_cast<Flag*>(flag));
    (*owned)->store(true);
}

}  // namespace

GraphGone watch_graph(cuda::Stream stream) {
    const cuda::Driver& driver = cuda::Driver::get();
    int status = cuda::kCaptureNone;
    unsigned long long id = 0;
    cuda::Graph graph = nullptr;
    const cuda::GraphNode* nodes = nullptr;
    size_t count = 0;
    driver.check(driver.capture_info(stream, &status, &id, &graph, &nodes, &count), "asking for the captured graph");
    auto gone = std::make_shared<std::atomic<bool>>(false);
    auto owned = std::make_unique<Flag>(gone);
    cuda::UserObject object = nullptr;
    driver.check(driver.user_object_create(&object, owned.get(), note_gone, 1, cuda::kNoDestructorSync),
                 "watching a graph");
    owned.release();  // owned by the user object, whose only reference goes to the graph
    driver.check(driver.graph_retain(graph, object, 1, cuda::kRetainMove), "watching a graph");
    return gone;
}

}  // namespace deep_ep::host
