// When software NICs execute requests, and what kernels share with them is across the bus.
#pragma once

#include <mutex>

#include "observe/observer.h"
#include "sim/ptx/time/memory_time.h"

namespace deep_ep::ptx {

class NicTime final : public observe::Observer {
  public:
    static constexpr u32 kPlace = ~0u;  // of NICs, on paths

    // `rate`: bytes per second that the NICs of a rank send; 0: any number.
    NicTime(MemoryTime& memory, double rate)
        : memory_(memory), cycles_per_byte_(rate == 0 ? 0 : 1e9 * machine::kCyclesPerNs / rate) {}

    // Bytes that the NICs of a rank have sent so far.
    u64 sent(u32 rank) const {
        const auto found = ports_.find(rank);
        return found == ports_.end() ? 0 : found->second.sent;
    }

    // Hosts have threads of their own, and make and end queue pairs. All NICs run on the thread of the kernels.
    void lock() override { mutex_.lock(); }
    void unlock() override { mutex_.unlock(); }
    void share(const observe::Accessor& by, const void* memory, u64 bytes) override;
    u64 load_word(const observe::Accessor& by, const void* word, u32 bytes, u64 newest,
                  const observe::Accessor* behind) override;
    void look(const observe::Accessor&, const void*, u32) override {}
    void store_word(const observe::Accessor& by, const void* word, u32 bytes, u64 before, u64 after,
                    bool updates) override;
    void read(const observe::Accessor&, const void*, u64) override {}
    void write(const observe::Accessor& by, const void* memory, u64 bytes) override;
    void tell_hosts(const observe::Accessor&) override {}
    void hear_hosts(const observe::Accessor&) override {}
    void begin(const observe::Accessor&) override {}
    void end(const observe::Accessor& by) override { queues_.erase(by.self); }

  private:
    // What the queue pairs of a rank share.
    struct Port {
        double free = 0;  // when it can send the next byte
        u64 sent = 0;
    };

    std::mutex mutex_;
    MemoryTime& memory_;
    const double cycles_per_byte_;
    std::unordered_map<const void*, Moment> queues_;  // how far each queue pair is
    std::map<u32, Port> ports_;                       // by rank
};

}  // namespace deep_ep::ptx
