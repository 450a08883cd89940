// Leaves commands in a ring as a kernel does (fabric/proxy.h), from a thread of the host: for timing what comes of them
// without the time that the executor takes for a kernel. Only one writes to a ring.
#pragma once

#include "fabric/proxy.h"
#include "host/network/network.h"
#include "wire/proxy.h"

namespace deep_ep::host::proxy {

class CommandWriter {
  public:
    // `state`: of a network whose memory a host may access.
    explicit CommandWriter(void* state) : net_(*static_cast<fabric::Proxy*>(state)), ring_(net_.rings[0]) {}

    // False: the ring is full.
    bool put(u32 to, u32 word, u64 source, u64 target, u64 bytes) {
        // Pairs with the proxy's release: it has copied what the slot held.
        if (posted_ - __atomic_load_n(&ring_.meeting->taken, __ATOMIC_ACQUIRE) >= net_.commands) return false;
        wire::proxy::Command& command = ring_.commands[posted_ & (net_.commands - 1)];
        const u64 lap = wire::proxy::lap_at(posted_++, net_.commands);
        const u64 low = wire::proxy::command_low(lap, wire::proxy::kLast, bytes, source);
        // The proxy acquires the upper half, and reads the lower one then: the order of a kernel's stores.
        __atomic_store_n(&command.low, low, __ATOMIC_RELAXED);
        __atomic_store_n(&command.high, wire::proxy::command_high(lap, to, word, target), __ATOMIC_RELEASE);
        return true;
    }
    // The proxy's release says that their sources have been read, and their targets written.
    u64 retired() const { return __atomic_load_n(&ring_.meeting->retired, __ATOMIC_ACQUIRE); }

  private:
    const fabric::Proxy& net_;
    const fabric::ProxyRing& ring_;
    u64 posted_ = 0;
};

// The word of the first region that measured puts of a source are for, in this rank's bank.
constexpr u32 kMeasuredWord = 0;
inline const u64* measured_word(const NetworkPlace& place, u32 source) {
    return reinterpret_cast<const u64*>(place.host_words + place.generation % wire::kBanks * place.layout.bank_bytes() +
                                        place.layout.word_in_bank(0, kMeasuredWord, source));
}
// Puts that the total in a word counts. Pairs with the proxy's release: all that they have brought is visible.
inline u64 puts_in_word(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE) / wire::kUnit; }

}  // namespace deep_ep::host::proxy
