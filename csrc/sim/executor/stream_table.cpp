#include "sim/executor/stream_table.h"

#include <stdexcept>

namespace deep_ep::cpu {

StreamTable::Launched StreamTable::launch(const Launch& launch) {
    const size_t index = index_of(launch.rank, launch.stream);
    const u64 serial = ++launches_ * kMax + index;
    streams_[index]->enqueue(launch, serial);
    return {*streams_[index], serial};
}

size_t StreamTable::index_of(int rank, int number) {
    const auto found = index_.find({rank, number});
    if (found != index_.end()) return found->second;
    if (free_.empty()) {
        if (count_ == kMax) throw std::length_error("more than 4096 streams");
        streams_[count_] = std::make_unique<Stream>();
        free_.push_back(count_++);
    }
    const size_t index = free_.back();
    free_.pop_back();
    index_[{rank, number}] = index;
    return index;
}

u64 StreamTable::last_launch(int rank, int number) const {
    const auto found = index_.find({rank, number});
    return found == index_.end() ? 0 : streams_[found->second]->last_enqueued;
}

void StreamTable::release(int rank, int number) {
    const auto found = index_.find({rank, number});
    if (found == index_.end()) return;
    const Stream& stream = *streams_[found->second];
    if (stream.running || !stream.pending.empty()) return;
    free_.push_back(found->second);
    index_.erase(found);
}

void StreamTable::release_all() {
    for (const auto& [name, index] : index_) free_.push_back(index);
    index_.clear();
}

}  // namespace deep_ep::cpu
