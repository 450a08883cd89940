// A thread's copies from shared to global memory that are on their way, in the groups that it has made of them.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "ptx/module.h"

namespace deep_ep::ptx {

class BulkStores {
  public:
    void add(u8* target, const u8* source, u64 bytes) { open_.push_back({target, source, bytes, {}}); }
    void commit() {
        groups_.push_back(std::move(open_));
        open_.clear();
    }
    // All groups but the latest `pending` have read their source. They read as late as they may: now. `on_read(source,
    // bytes)`: of each that reads.
    template <class OnRead>
    void read(u64 pending, OnRead on_read) {
        for (size_t i = 0; i + pending < groups_.size(); ++i) {
            for (Store& store : groups_[i]) store.read(on_read);
        }
    }
    // They have written too.
    template <class OnRead, class OnWrite>
    void complete(u64 pending, OnRead on_read, OnWrite on_write) {
        while (groups_.size() > pending) {
            for (Store& store : groups_.front()) {
                store.read(on_read);
                on_write(store.target, store.bytes);
                std::copy(store.data.begin(), store.data.end(), store.target);
            }
            groups_.pop_front();
        }
    }
    bool empty() const { return open_.empty() && groups_.empty(); }

  private:
    struct Store {
        u8* target;
        const u8* source;
        u64 bytes;
        std::vector<u8> data;

        template <class OnRead>
        void read(OnRead on_read) {
            if (!data.empty()) return;
            on_read(source, bytes);
            data.assign(source, source + bytes);
        }
    };
    std::vector<Store> open_;
    std::deque<std::vector<Store>> groups_;
};

}  // namespace deep_ep::ptx
