// A thread's copies from shared to global memory that are on their way, in the groups that it has made of them.
#pragma once

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
    // All groups but the latest `pending` have read their source. They read as late as they may: now.
    void read(u64 pending) {
        for (size_t i = 0; i + pending < groups_.size(); ++i) {
            for (Store& store : groups_[i]) store.read();
        }
    }
    // They have written too.
    void complete(u64 pending) {
        while (groups_.size() > pending) {
            for (Store& store : groups_.front()) store.write();
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

        void read() {
            if (data.empty()) data.assign(source, source + bytes);
        }
        void write() {
            read();
            std::copy(data.begin(), data.end(), target);
        }
    };
    std::vector<Store> open_;
    std::deque<std::vector<Store>> groups_;
};

}  // namespace deep_ep::ptx
