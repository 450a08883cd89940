#include "host/session/failure_count.h"

#include <algorithm>
#include <map>

namespace deep_ep::host {

std::shared_ptr<FailureCount> FailureCount::of(uint64_t rank_key, Memory& memory) {
    static std::mutex mutex;
    static std::map<uint64_t, std::weak_ptr<FailureCount>> all;
    const std::lock_guard<std::mutex> guard(mutex);
    std::erase_if(all, [](const auto& entry) { return entry.second.expired(); });
    if (const auto found = all.find(rank_key); found != all.end()) return found->second.lock();
    const auto count = std::static_pointer_cast<u64>(memory.make_private(sizeof(u64)));
    const std::shared_ptr<FailureCount> made(new FailureCount(count));
    all[rank_key] = made;
    return made;
}

void FailureCount::join(Member& member) {
    const std::lock_guard<std::mutex> guard(mutex_);
    members_.push_back(&member);
}

void FailureCount::leave(Member& member) {
    const std::lock_guard<std::mutex> guard(mutex_);
    members_.erase(std::remove(members_.begin(), members_.end(), &member), members_.end());
    if (member.untold()) ++told_;
}

void FailureCount::note_told() {
    const std::lock_guard<std::mutex> guard(mutex_);
    ++told_;
}

uint64_t FailureCount::told() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return told_;
}

uint64_t FailureCount::left_behind() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return left_behind_;
}

std::optional<uint64_t> FailureCount::settled(Memory& memory, uint64_t nanoseconds) {
    std::vector<std::function<bool(uint64_t)>> waits;
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        for (const Member* member : members_) {
            if (auto wait = member->leaving(); wait) waits.push_back(std::move(wait));
        }
    }
    for (const auto& wait : waits) {  // without the lock: other Buffers may be created and destroyed
        if (!wait(nanoseconds)) return std::nullopt;
    }
    // Read before the members are asked: a later failure makes the count differ from the one that the caller compares
    // with. Acquire: pairs with the release of the kernel that has counted, so that untold() finds its claim.
    const uint64_t count = memory.acquire_word(reinterpret_cast<const uint64_t*>(count_.get()));
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const Member* member : members_) {
        if (member->untold()) return std::nullopt;
    }
    left_behind_ = count;
    return count;
}

}  // namespace deep_ep::host
