#include "ptx/order/order.h"

namespace deep_ep::ptx {
namespace {

std::shared_ptr<Order> watched_now;

}  // namespace

std::shared_ptr<Order> Order::watched() { return watched_now; }

void Order::watch(bool on) { watched_now = on ? std::make_shared<Order>() : nullptr; }

void Order::add_heap(u64 base, u64 bytes) {
    in_heaps_.forget(base, bytes);
    for (const Heap& heap : heaps_) {
        if (heap.base == base && heap.bytes == bytes) return;
    }
    heaps_.push_back({base, bytes});
}

Actor Order::begin(u32 rank, u64 launch, u64 threads, u64 block) {
    auto found = launches_.find(launch);
    if (found == launches_.end()) {
        Ended& ended = ended_[rank];
        found = launches_.emplace(launch, Launch{ended.clock, std::move(ended.numbers), threads}).first;
        ended.numbers.clear();
    }
    std::vector<u32>& numbers = found->second.numbers;
    const auto take = [&] {
        if (numbers.empty()) return actors_++;
        const u32 number = numbers.back();
        numbers.pop_back();
        return number;
    };
    const u32 number = take();
    Actor made{number, take(), rank, launch, block, found->second.begin, found->second.begin};
    made.tick();
    made.copies.set(made.copies_number, made.copies.time_of(made.copies_number) + 1);
    made.fence_copies();
    return made;
}

void Order::end(Actor& actor) {
    Ended& ended = ended_[actor.rank];
    ended.clock.join(actor.clock);
    ended.clock.join(actor.copies);
    ended.numbers.insert(ended.numbers.end(), {actor.number, actor.copies_number});
    const auto found = launches_.find(actor.launch);
    if (found == launches_.end() || --found->second.threads != 0) return;
    const std::vector<u32>& left = found->second.numbers;
    ended.numbers.insert(ended.numbers.end(), left.begin(), left.end());
    launches_.erase(found);
}

Shadow& Order::global(u64 address, u32 rank) {
    for (const Heap& heap : heaps_) {
        if (address >= heap.base && address < heap.base + heap.bytes) return in_heaps_;
    }
    return of_rank_[rank];
}

}  // namespace deep_ep::ptx
