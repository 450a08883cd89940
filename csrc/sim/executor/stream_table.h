// All streams, by rank and number, and by the serial numbers of their launches.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "sim/executor/streams.h"

namespace deep_ep::cpu {

// A released stream keeps its warm stacks for its next user. It is never moved or destroyed, since finished() reads it
// without a lock. Serial numbers contain the index of the stream and only grow, so that one from before a release
// counts as finished.
class StreamTable {
  public:
    struct Launched {
        Stream& stream;
        u64 serial;
    };
    Launched launch(const Launch& launch);

    Stream& of_serial(u64 serial) const { return *streams_[serial % kMax]; }
    static u64 number_of(u64 serial) { return serial / kMax; }  // counts launches, from 1
    u64 launches() const { return launches_; }
    u64 last_launch(int rank, int number) const;  // 0 if there was none

    void release(int rank, int number);  // unless it is busy
    void release_all();                  // all must be idle

    template <class Visit>
    void for_each(Visit visit) const {
        for (size_t i = 0; i < count_; i++) visit(*streams_[i]);
    }

  private:
    static constexpr size_t kMax = 4096;
    size_t index_of(int rank, int number);

    std::unique_ptr<Stream> streams_[kMax];
    size_t count_ = 0;
    std::map<std::pair<int, int>, size_t> index_;
    std::vector<size_t> free_;
    u64 launches_ = 0;
};

}  // namespace deep_ep::cpu
