#include "sim/ptx/order/word.h"

namespace deep_ep::ptx {

u64 Word::load(u64 newest, bool acquires, const Made& access, const Clock& knows, Clock& clock, cpu::Random* random) {
    // The value was changed by an access that was not reported, by a host for example. The history is no longer valid.
    if (entries_.empty() || entries_.back().value != newest) {
        entries_.clear();
        return newest;
    }
    size_t from = entries_.size() - 1;
    const auto hides_older = [&](const Entry& entry) {
        if (knows.covers(entry.written)) return true;
        for (const Epoch& read : entry.reads) {
            if (knows.covers(read)) return true;
        }
        return false;
    };
    if (random != nullptr && random->one_in(kStaleOneIn)) {
        size_t oldest = from;
        while (oldest > 0 && !hides_older(entries_[oldest])) --oldest;
        from = oldest + random->below(from - oldest + 1);
    }
    Entry& entry = entries_[from];
    std::erase_if(entry.reads, [&](const Epoch& read) { return read.actor == access.moment.actor; });
    entry.reads.push_back(access.moment);
    if (acquires) {
        for (const Released& released : entry.releases) {
            if (morally_strong(released.by, access)) clock.join(released.clock);
        }
    }
    return entry.value;
}

void Word::store(const Stored& stored, const Made& access, const std::vector<Released>& releases) {
    if (entries_.empty() || entries_.back().value != stored.before) {
        entries_.clear();
        entries_.push_back({stored.before, {}, {}, {}});  // older than all known stores
    }
    Entry made{stored.after, access.moment, {}, {}};
    if (stored.updates) made.releases = entries_.back().releases;
    made.releases.insert(made.releases.end(), releases.begin(), releases.end());
    if (entries_.size() == kMax) entries_.erase(entries_.begin());
    entries_.push_back(std::move(made));
}

}  // namespace deep_ep::ptx
