// A thread's copies from shared to global memory that are on their way, in the groups that it has made of them.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "ptx/order/actor.h"

namespace deep_ep::ptx {

// A copy that has been issued: what it comes after, and what it is itself for those that come after it.
struct IssuedStore {
    Clock after;
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
    // All groups but the latest `pending` have read their source. They read as late as they may: now. `on_read(store)`:
    // of each that reads.
    template <class OnRead>
    void read(u64 pending, OnRead on_read) {
        for (size_t i = 0; i + pending < groups_.size(); ++i) {
            for (Store& store : groups_[i]) read(store, on_read);
        }
    }
    // They have written too.
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
