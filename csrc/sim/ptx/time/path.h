// A moment in a kernel on a GPU, and the longest path of instructions that leads there.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "wire/types.h"

namespace deep_ep::ptx {

// Cycles of a path by place (an index into Module::places), in no order; a place may occur several times.
class Shares {
  public:
    void add(u32 place, float cycles) {
        if (!all_.empty() && all_.back().first == place) {
            all_.back().second += cycles;
            return;
        }
        if (all_.size() >= most_) compact();
        all_.emplace_back(place, cycles);
    }
    void add(const Shares& others) {
        for (const auto& [place, cycles] : others.all_) add(place, cycles);
    }
    const std::vector<std::pair<u32, float>>& all() const { return all_; }
    void clear() { all_.clear(); }
    void compact() {
        std::sort(all_.begin(), all_.end(), [](const auto& one, const auto& other) { return one.first < other.first; });
        size_t kept = 0;
        for (size_t i = 1; i < all_.size(); ++i) {
            if (all_[i].first == all_[kept].first) {
                all_[kept].second += all_[i].second;
            } else {
                all_[++kept] = all_[i];
            }
        }
        all_.resize(std::min(all_.size(), kept + 1));
        most_ = std::max(most_, 2 * all_.size());
    }

  private:
    std::vector<std::pair<u32, float>> all_;
    size_t most_ = 64;  // before it is compacted
};

// A stretch of a path. Threads that have met share what lies behind them.
struct Stretch {
    std::shared_ptr<Stretch> before;
    Shares shares;

    ~Stretch() {
        // One by one: a recursion could be as deep as the path is long.
        for (auto last = std::move(before); last != nullptr && last.use_count() == 1;) last = std::move(last->before);
    }
};

struct Moment {
    double cycles = 0;
    // What the path consists of. A wait is one for data from global memory.
    u64 instructions = 0, waits = 0, fences = 0, barriers = 0;
    std::shared_ptr<Stretch> path;

    void join(const Moment& other) {
        if (other.cycles > cycles) *this = other;
    }
    void add(const Shares& shares) {
        if (path == nullptr || path.use_count() != 1) {
            auto stretch = std::make_shared<Stretch>();
            stretch->before = std::move(path);
            path = std::move(stretch);
        }
        path->shares.add(shares);
    }
    // The path goes on at `place` until then.
    void go_on(double until, u32 place) {
        Shares spent;
        spent.add(place, static_cast<float>(until - cycles));
        add(spent);
        cycles = until;
    }
};

// What threads ask of a GPU, whenever they do: it has a bandwidth and issues so many instructions per cycle.
struct Work {
    u64 instructions = 0;               // of threads
    u64 own_bytes = 0, peer_bytes = 0;  // of rows: accesses of at least 16 bytes by a thread, and bulk copies

    void add(const Work& other) {
        instructions += other.instructions;
        own_bytes += other.own_bytes;
        peer_bytes += other.peer_bytes;
    }
};

// The moments at which threads come to a barrier. Used like BarrierClocks, whose rounds follow each other.
class BarrierMoments {
  public:
    const Moment& latest() const { return moments_[number_ % 2]; }
    u64 arrive(const Moment& moment) {
        moments_[number_ % 2].join(moment);
        return number_;
    }
    u64 number() const { return number_; }
    const Moment& leave(u64 number) {
        if (number == number_) moments_[++number_ % 2] = {};
        return moments_[number % 2];
    }

  private:
    u64 number_ = 0;
    Moment moments_[2];
};

}  // namespace deep_ep::ptx
