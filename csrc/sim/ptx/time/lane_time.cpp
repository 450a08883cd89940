#include "sim/ptx/time/lane_time.h"

namespace deep_ep::ptx {
namespace {

constexpr u64 kWord = MemoryTime::kWord;
constexpr u64 kRowBytes = 16;  // that a thread loads or stores at once, at least
constexpr double kPollCycles = 4000;

}  // namespace

void LaneTime::write(size_t slot, double ready, bool is_load) {
    for (Pending& pending : pending_) {
        if (pending.slot != slot) continue;
        pending = {slot, ready, is_load};
        return;
    }
    pending_.push_back({slot, ready, is_load});
}

void LaneTime::wait_for(const Instruction& instruction, size_t registers) {
    std::erase_if(pending_, [&](const Pending& pending) { return pending.ready + machine::kGuard <= now_.cycles; });
    double ready = now_.cycles;
    bool on_load = false;
    const auto look_at = [&](const Operand& operand, double delay) {
        if (operand.kind != OperandKind::kRegister && operand.kind != OperandKind::kAddress) return;
        for (const Pending& pending : pending_) {
            if (pending.slot != registers + operand.index || pending.ready + delay <= ready) continue;
            ready = pending.ready + delay;
            on_load = pending.is_load;
        }
    };
    if (!pending_.empty()) {
        for (u32 i = 0; i < instruction.count; ++i) look_at(instruction.operands[i], 0);
        look_at(instruction.guard, machine::kGuard);
    }
    wait_until(ready);
    now_.waits += on_load;
}

void LaneTime::execute(const Instruction& instruction, const Cost& cost, size_t registers) {
    place_ = instruction.place;
    wait_for(instruction, registers);
    ++now_.instructions;
    ++work_.instructions;
    if (cost.fence != FenceCost::kNone) fence(cost.fence);
    const double begin = now_.cycles;
    advance(cost.issue + (cost.is_branch ? machine::kBranchTaken : 0), place_);
    if (!cost.has_result || cost.latency == 0) return;
    const u32 results = instruction.meets == Meets::kWarp && instruction.count == 6 ? 2 : instruction.vector;
    for (u32 i = 0; i < results && i < instruction.count; ++i) {
        const Operand& operand = instruction.operands[i];
        if (operand.kind == OperandKind::kRegister) write(registers + operand.index, begin + cost.latency, false);
    }
}

void LaneTime::skip(const Instruction& instruction, size_t registers) {
    place_ = instruction.place;
    double ready = now_.cycles;
    for (const Pending& pending : pending_) {
        if (pending.slot != registers + instruction.guard.index) continue;
        ready = pending.ready + machine::kGuard;
        now_.waits += pending.is_load && ready > now_.cycles;
    }
    wait_until(ready);
    advance(1, place_);
}

void LaneTime::fence(FenceCost fence) {
    switch (fence) {
        case FenceCost::kNone:
            return;
        case FenceCost::kBlock:
            return advance(machine::kBlockFence, place_);
        case FenceCost::kDevice:
        case FenceCost::kSystem:
            break;
    }
    ++now_.fences;
    const double least = fence == FenceCost::kDevice ? machine::kDeviceFence : machine::kSystemFence;
    wait_until(std::max(done_, now_.cycles + least));
}

void LaneTime::arrive(const Instruction& instruction, size_t registers, double cycles, bool is_load) {
    for (u32 i = 0; i < instruction.vector; ++i) {
        const Operand& operand = instruction.operands[i];
        if (operand.kind == OperandKind::kRegister) write(registers + operand.index, cycles, is_load);
    }
}

void LaneTime::load_own(const Instruction& instruction, size_t registers) {
    if (instruction.space != Space::kParam) arrive(instruction, registers, now_.cycles + machine::kL1, false);
}

void LaneTime::access(const Instruction& instruction, const Cost& cost, size_t registers, const TimedAccess& access) {
    using Kind = TimedAccess::Kind;
    const auto [address, bytes, kind, is_word, is_shared, is_peers] = access;
    if (is_shared) {
        if (kind != Kind::kStore) arrive(instruction, registers, now_.cycles + machine::kShared, false);
        return;
    }
    const bool on_bus = memory_.is_on_bus(address);
    if (bytes >= kRowBytes && !on_bus) move(bytes, is_peers);
    const double begin = now_.cycles;
    double arrives = 0;
    if (kind != Kind::kStore) {
        const u64 line = address / machine::kLine;
        const double* const in_l1 = is_word || is_peers || on_bus ? nullptr : block_.l1.find(line);
        if (in_l1 != nullptr) {
            arrives = std::max(begin + machine::kL1, *in_l1);
        } else {
            arrives = memory_.load(block_.l2, address, bytes, is_peers, begin);
            if (!is_word && !is_peers && !on_bus) block_.l1.insert(line, arrives);
        }
        arrive(instruction, registers, arrives, true);
    }
    if (kind != Kind::kLoad) done_ = std::max(done_, memory_.store(block_.l2, address, bytes, is_peers, begin));
    if (!is_word) return;
    if (cost.acquires || cost.waits) {
        wait_until(arrives);
        ++now_.waits;
    }
    // A vector of words is one access to several of them.
    for (u64 word = address / kWord; word <= (address + bytes - 1) / kWord; ++word) {
        if (kind != Kind::kStore) {
            see(word, memory_.way(address, is_peers));
            if (now_.cycles > arrives) arrive(instruction, registers, now_.cycles, true);
        }
        if (kind != Kind::kLoad) {
            memory_.words[word].join(later(begin + memory_.way(address, is_peers)));
        }
    }
    if (cost.acquires) block_.l1.clear();
}

Moment LaneTime::bulk_load(u64 address, u64 bytes, bool is_peers) {
    move(bytes, is_peers);
    const double issued = block_.copy(bytes, now_.cycles);
    return later(memory_.load(block_.l2, address, bytes, is_peers, issued));
}

void LaneTime::bulk_store(u64 address, u64 bytes, bool is_peers) {
    move(bytes, is_peers);
    const double read = block_.copy(bytes, now_.cycles);
    open_.read = std::max(open_.read, read);
    open_.written = std::max(open_.written,
                             memory_.store(block_.l2, address, bytes, is_peers, read) + memory_.way(address, is_peers));
}

void LaneTime::wait_group(u64 pending, bool written) {
    double until = 0;
    for (size_t i = 0; i + pending < groups_.size(); ++i) {
        until = std::max(until, written ? groups_[i].written : groups_[i].read);
    }
    if (written) {
        while (groups_.size() > pending) groups_.pop_front();
    }
    wait_until(until);
}

double LaneTime::look(u64 word) {
    for (auto& [looked_at, moment] : looks_) {
        if (looked_at == word) return std::exchange(moment, now_.cycles);
    }
    looks_[oldest_look_++ % kLooks] = {word, now_.cycles};
    return std::numeric_limits<double>::max();
}

void LaneTime::see(u64 word, double way) {
    const double last = look(word);
    const auto found = memory_.words.find(word);
    if (found == memory_.words.end()) return;
    const Moment& stored = found->second;
    const double late = now_.cycles - stored.cycles;
    const bool polls = now_.cycles - last <= kPollCycles;  // it has done nothing else since then
    if (last < stored.cycles && late > way && polls) {
        now_ = stored;
        own_.clear();
        advance(late, place_);
    } else {
        join(stored, way);
    }
}

const Moment& LaneTime::here() {
    if (own_.all().empty()) return now_;
    now_.add(own_);
    own_.clear();
    return now_;
}

Moment LaneTime::later(double cycles) {
    Moment moment = here();
    moment.go_on(cycles, place_);
    return moment;
}

void LaneTime::join(const Moment& moment, double delay) {
    if (moment.cycles + delay <= now_.cycles) return;
    now_ = moment;
    own_.clear();
    advance(delay, place_);
}

}  // namespace deep_ep::ptx
