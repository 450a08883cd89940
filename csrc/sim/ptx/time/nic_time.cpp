#include "sim/ptx/time/nic_time.h"

namespace deep_ep::ptx {
namespace {

u64 word_at(const void* memory) { return reinterpret_cast<u64>(memory) / MemoryTime::kWord; }
bool is_nic(const observe::Accessor& by) { return by.kind == observe::Kind::kNic; }

}  // namespace

void NicTime::share(const observe::Accessor&, const void* memory, u64 bytes) {
    memory_.add_bus(reinterpret_cast<u64>(memory), bytes);
}

// The record of a doorbell, `behind`, that has arrived.
u64 NicTime::load_word(const observe::Accessor& by, const void*, u32, u64 newest, const observe::Accessor* behind) {
    if (!is_nic(by) || behind == nullptr) return newest;
    const auto stored = memory_.words.find(word_at(behind->self));
    Moment& now = queues_[by.self];
    if (stored == memory_.words.end() || stored->second.cycles + machine::kNicStart <= now.cycles) return newest;
    now = stored->second;
    now.go_on(now.cycles + machine::kNicStart, kPlace);
    return newest;
}

void NicTime::write(const observe::Accessor& by, const void*, u64 bytes) {
    if (!is_nic(by)) return;
    Moment& now = queues_[by.self];
    Port& port = ports_[by.rank];
    port.free = std::max(port.free, now.cycles) + static_cast<double>(bytes) * cycles_per_byte_;
    port.sent += bytes;
    now.go_on(port.free, kPlace);
}

// The word of a signal, or a completion, which waits for the peer's answer.
void NicTime::store_word(const observe::Accessor& by, const void* word, u32 bytes, u64, u64, bool) {
    if (!is_nic(by)) return;
    Moment there = queues_[by.self];
    const u64 address = reinterpret_cast<u64>(word);
    there.go_on(there.cycles + (memory_.is_on_bus(address) ? 2 : 1) * machine::kNicWay, kPlace);
    for (u64 i = word_at(word); i <= (address + bytes - 1) / MemoryTime::kWord; ++i) memory_.words[i].join(there);
}

}  // namespace deep_ep::ptx
