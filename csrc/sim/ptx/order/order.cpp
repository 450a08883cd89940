#include "sim/ptx/order/order.h"

#include "sim/ptx/order/others.h"

namespace deep_ep::ptx {
namespace {

std::shared_ptr<Order> watched_now;

}  // namespace

std::shared_ptr<Order> Order::watched() { return watched_now; }

void Order::watch(bool on, u64 seed) {
    static Others others;
    observe::observer.store(nullptr, std::memory_order_release);
    watched_now = on ? std::make_shared<Order>(seed) : nullptr;
    others.order = watched_now;
    if (on) observe::observer.store(&others, std::memory_order_release);
}

void Order::add_heap(u64 base, u64 bytes) {
    in_heaps_.forget(base, bytes);
    std::erase_if(heaps_, [&](const auto& heap) { return heap.first < base + bytes && base < heap.second; });
    heaps_.emplace(base, base + bytes);
}

Actor Order::begin(u32 rank, u64 launch, u64 threads, u64 block) {
    auto found = launches_.find(launch);
    if (found == launches_.end()) {
        Ended& ended = ended_[rank];
        found = launches_.emplace(launch, Launch{ended.clock, {}, std::move(ended.numbers), {}, threads}).first;
        ended.numbers.clear();
        const auto host = others_.find(key_of(observe::host(rank)));
        if (host != others_.end()) host->second.release(found->second.begin);
    }
    std::vector<u32>& numbers = found->second.numbers;
    u32 number = actors_;
    if (numbers.empty()) {
        actors_ += 1 + kKindsOfCopies;
    } else {
        number = numbers.back();
        numbers.pop_back();
    }
    Actor made{number, rank, launch, block, found->second.begin, {found->second.begin, found->second.begin}};
    for (u32 kind = 0; kind < kKindsOfCopies; ++kind) made.issued[kind] = made.clock.time_of(number + 1 + kind);
    made.tick();
    return made;
}

void Order::end(Actor& actor) {
    const auto found = launches_.find(actor.launch);
    if (found == launches_.end()) return;
    Launch& launch = found->second;
    launch.end.join(actor.clock);
    launch.end.join(actor.copies.global);
    launch.end.join(actor.copies.shared);
    launch.used.push_back(actor.number);
    if (--launch.threads != 0) return;
    Ended& ended = ended_[actor.rank];
    ended.clock.join(launch.end);
    for (const std::vector<u32>* of : {&launch.numbers, &launch.used}) {
        ended.numbers.insert(ended.numbers.end(), of->begin(), of->end());
    }
    launches_.erase(found);
}

Actor& Order::other(const observe::Accessor& accessor) {
    auto found = others_.find(key_of(accessor));
    if (found == others_.end()) {
        const u32 number = actors_++;
        Actor made{number, accessor.rank, 0, ~u64{number}, {}, {}};
        made.tick();
        found = others_.emplace(key_of(accessor), std::move(made)).first;
    }
    if (accessor.kind == observe::Kind::kHost) found->second.clock.join(ended_[accessor.rank].clock);
    return found->second;
}

void Order::begin_other(const observe::Accessor& accessor) {
    const Clock seen = other(observe::host(accessor.rank)).clock;
    other(accessor).clock.join(seen);
}

void Order::end_other(const observe::Accessor& accessor) {
    const auto found = others_.find(key_of(accessor));
    if (found == others_.end()) return;
    ended_[accessor.rank].clock.join(found->second.clock);  // it was ended by the host
    others_.erase(found);
}

Shadow& Order::global(u64 address, u32 rank) {
    const auto next = heaps_.upper_bound(address);
    const bool is_shared = next != heaps_.begin() && address < std::prev(next)->second;
    return is_shared ? in_heaps_ : of_rank_[rank];
}

}  // namespace deep_ep::ptx
