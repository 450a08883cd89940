// Writes commands to a ring as a kernel does (fabric/proxy.h), but from a host thread, so that their handling can be
// timed without the executor's overhead for a kernel. A ring has only one such writer.
#pragma once

#include "fabric/proxy.h"
#include "host/network/network.h"
#include "wire/proxy.h"

namespace deep_ep::host::proxy {

class CommandWriter {
  public:
    // `state`: that of a network whose memory the host may access.
    explicit CommandWriter(void* state) : net_(*static_cast<fabric::Proxy*>(state)), ring_(net_.rings[0]) {}

    // Returns false if the ring is full.
    bool put(u32 to, u32 word, u64 source, u64 target, u64 bytes) {
        // Pairs with the proxy's release, after it has copied the slot's previous command.
        if (posted_ - __atomic_load_n(&ring_.progress->taken, __ATOMIC_ACQUIRE) >= net_.commands) return false;
        wire::proxy::Command& command = ring_.commands[posted_ & (net_.commands - 1)];
        const u64 lap = wire::proxy::lap_at(posted_++, net_.commands);
        const u64 low = wire::proxy::command_low(lap, wire::proxy::kLast, bytes, source);
        // The proxy acquires the upper half and then reads the lower one. Kernels store in the same order as here.
        __atomic_store_n(&command.low, low, __ATOMIC_RELAXED);
        __atomic_store_n(&command.high, wire::proxy::command_high(lap, to, word, target), __ATOMIC_RELEASE);
        return true;
    }
    // Pairs with the proxy's release: the sources of retired commands have been read and their targets written.
    u64 retired() const { return __atomic_load_n(&ring_.progress->retired, __ATOMIC_ACQUIRE); }

  private:
    const fabric::Proxy& net_;
    const fabric::ProxyRing& ring_;
    u64 posted_ = 0;
};

// The word in this rank's bank that the measured puts of a source signal; it belongs to the first region.
constexpr u32 kMeasuredWord = 0;
inline const u64* measured_word(const NetworkPlace& place, u32 source) {
    return reinterpret_cast<const u64*>(place.own_heap() + place.layout.bank_offset(place.generation) +
                                        place.layout.word_in_bank(0, kMeasuredWord, source));
}
// The number of puts that the total in a word counts. Pairs with the proxy's release: their payload is visible.
inline u64 puts_in_word(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE) / wire::kUnit; }

}  // namespace deep_ep::host::proxy
