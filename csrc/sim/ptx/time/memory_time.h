// When accesses to memory are performed: a model of the caches, and of the signals that threads exchange through words.
#pragma once

#include <deque>
#include <map>
#include <unordered_map>

#include "sim/ptx/time/costs.h"
#include "sim/ptx/time/path.h"

namespace deep_ep::ptx {

// The lines in a cache, and when each arrives there. Lines leave it in the order in which they came.
class Cache {
  public:
    explicit Cache(u64 bytes) : most_(bytes / machine::kLine) {}

    // Null if it holds no such line.
    const double* find(u64 line) const {
        const auto found = lines_.find(line);
        return found == lines_.end() ? nullptr : &found->second;
    }
    void insert(u64 line, double arrives) {
        if (!lines_.try_emplace(line, arrives).second) return;
        order_.push_back(line);
        if (order_.size() <= most_) return;
        lines_.erase(order_.front());
        order_.pop_front();
    }
    void clear() {
        lines_.clear();
        order_.clear();
    }

  private:
    const u64 most_;
    std::unordered_map<u64, double> lines_;
    std::deque<u64> order_;
};

// The memory of all ranks' GPUs, or of the one GPU that they share, and what they reach across the bus.
class MemoryTime {
  public:
    static constexpr u64 kWord = 4;  // bytes of the smallest one

    explicit MemoryTime(bool one_gpu) : one_gpu_(one_gpu) {}

    void add_bus(u64 base, u64 bytes) { bus_[base] = base + bytes; }
    bool is_on_bus(u64 address) const {
        const auto next = bus_.upper_bound(address);
        return next != bus_.begin() && address < std::prev(next)->second;
    }

    // The L2 of a rank's GPU.
    Cache& l2_of(u32 rank) { return l2_.try_emplace(one_gpu_ ? 0 : rank, machine::kL2Bytes).first->second; }
    // By address, in words: when a store of it can be seen by others, and the path that leads there.
    std::unordered_map<u64, Moment> words;

    // When a load that begins at `begin` has its data.
    double load(Cache& l2, u64 address, u64 bytes, bool is_peers, double begin) const {
        if (is_far(address, is_peers)) return begin + 2 * way(address, is_peers);
        double done = begin + machine::kL2;
        for (u64 line = address / machine::kLine; line <= (address + bytes - 1) / machine::kLine; ++line) {
            const double* const arrives = l2.find(line);
            if (arrives == nullptr) l2.insert(line, begin + machine::kHbm);
            done = std::max(done, arrives == nullptr ? begin + machine::kHbm : *arrives);
        }
        return done;
    }
    // When a store has been performed where others see it.
    double store(Cache& l2, u64 address, u64 bytes, bool is_peers, double begin) const {
        const bool is_near = !is_far(address, is_peers);
        for (u64 line = address / machine::kLine; is_near && line <= (address + bytes - 1) / machine::kLine; ++line) {
            l2.insert(line, begin);
        }
        return begin + way(address, is_peers);
    }
    // One way to memory: half of a load that finds its line in the L2.
    double way(u64 address, bool is_peers) const {
        if (is_on_bus(address)) return machine::kBus / 2;
        return (is_peers && !one_gpu_ ? machine::kPeer : machine::kL2) / 2;
    }

  private:
    bool is_far(u64 address, bool is_peers) const { return (is_peers && !one_gpu_) || is_on_bus(address); }

    const bool one_gpu_;
    std::map<u64, u64> bus_;  // ends by beginnings
    std::map<u32, Cache> l2_;
};

// The SM of a block.
struct BlockTime {
    explicit BlockTime(Cache& l2) : l2(l2) {}

    Cache& l2;
    Cache l1{machine::kL1Bytes};
    double bulk_free = 0;  // when its unit for bulk copies can begin the next one

    // When the unit has issued all requests of a copy.
    double copy(u64 bytes, double begin) {
        bulk_free =
            std::max(bulk_free, begin + machine::kBulkStart) + static_cast<double>(bytes) / machine::kBulkBytesPerCycle;
        return bulk_free;
    }
};

}  // namespace deep_ep::ptx
