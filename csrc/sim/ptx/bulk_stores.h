// A thread's bulk copies from shared to global memory that are in flight, by bulk group.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "sim/ptx/order/actor.h"

namespace deep_ep::ptx {

// The position of an issued copy in the order of accesses: what it is ordered after, and the moments of its read and
// its write.
struct IssuedStore {
    CopyClocks after;
    Epoch reads, writes;
};

class BulkStores {
  public:
    struct Store {
        u8* target;
        const u8* source;
        u64 bytes;
        IssuedStore issued;
        std::vector<u8> data;
    };

    void add(u8* target, const u8* source, u64 bytes, IssuedStore issued) {
        open_.push_back({target, source, bytes, std::move(issued), {}});
    }
    void commit() {
        groups_.push_back(std::move(open_));
        open_.clear();
    }
    // Makes all groups but the latest `pending` read their source. They read as late as PTX allows, which is now.
    // Calls `on_read(store)` for each copy that reads.
    template <class OnRead>
    void read(u64 pending, OnRead on_read) {
        for (size_t i = 0; i + pending < groups_.size(); ++i) {
            for (Store& store : groups_[i]) read(store, on_read);
        }
    }
    // The same, and makes them write.
    template <class OnRead, class OnWrite>
    void complete(u64 pending, OnRead on_read, OnWrite on_write) {
        while (groups_.size() > pending) {
            for (Store& store : groups_.front()) {
                read(store, on_read);
                on_write(store);
                std::copy(store.data.begin(), store.data.end(), store.target);
            }
            groups_.pop_front();
        }
    }
    bool empty() const { return open_.empty() && groups_.empty(); }

  private:
    template <class OnRead>
    static void read(Store& store, OnRead on_read) {
        if (!store.data.empty()) return;
        on_read(store);
        store.data.assign(store.source, store.source + store.bytes);
    }

    std::vector<Store> open_;
    std::deque<std::vector<Store>> groups_;
};

}  // namespace deep_ep::ptx
