#include "observe/timeline.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <set>
#include <string>

namespace deep_ep::observe::timeline {
namespace {

struct Recording {
    std::mutex mutex;
    std::vector<Event> events;
    std::set<std::string> names;  // kept for as long as the process runs: they are few
    size_t most = 0;
    u64 lost = 0;
    std::atomic<u64 (*)()> now_ns{nullptr};
};

Recording& recorded() {
    static auto* all = new Recording();  // threads of NICs may outlive static objects
    return *all;
}

}  // namespace

void start(size_t most, u64 (*now_ns)()) {
    Recording& all = recorded();
    const std::lock_guard<std::mutex> guard(all.mutex);
    all.events.clear();
    all.most = most;
    all.lost = 0;
    all.now_ns.store(now_ns);
    recording.store(true, std::memory_order_relaxed);
}

void add(const Event& event) {
    if (!on()) return;
    Recording& all = recorded();
    const std::lock_guard<std::mutex> guard(all.mutex);
    if (all.events.size() >= all.most) {
        ++all.lost;
    } else {
        all.events.push_back(event);
        all.events.back().name = all.names.emplace(event.name).first->c_str();
    }
}

u64 now() {
    const auto clock = on() ? recorded().now_ns.load() : nullptr;
    return clock != nullptr ? clock() : 0;
}

std::vector<Event> take(i32 rank) {
    Recording& all = recorded();
    const std::lock_guard<std::mutex> guard(all.mutex);
    const auto of_rank = [&](const Event& one) { return one.rank == rank; };
    std::vector<Event> taken;
    std::copy_if(all.events.begin(), all.events.end(), std::back_inserter(taken), of_rank);
    std::erase_if(all.events, of_rank);
    return taken;
}

u64 lost() {
    Recording& all = recorded();
    const std::lock_guard<std::mutex> guard(all.mutex);
    return all.lost;
}

void stop() {
    Recording& all = recorded();
    const std::lock_guard<std::mutex> guard(all.mutex);
    recording.store(false, std::memory_order_relaxed);
    all.events = {};
}

}  // namespace deep_ep::observe::timeline
