// What is timed: puts from this rank to one peer and back, whatever carries them, so that the proxy and bare calls of
// the same provider go through the same loops. The peer is another process, which runs the other half of each loop.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "host/network/network.h"

namespace deep_ep::host::proxy {

class Puts {
  public:
    virtual ~Puts() = default;
    virtual std::string name() const = 0;
    // False: not now.
    virtual bool post(u64 source, u64 target, u64 bytes) = 0;
    // Makes progress, or lets another thread make it.
    virtual void step() = 0;
    // Puts of this rank whose sources may be written again, and puts of the peer that have arrived whole.
    virtual u64 completed() const = 0;
    virtual u64 arrived() const = 0;
};

enum class Kind {
    kRaw,       // libfabric's calls alone
    kStepped,   // commands, proxy and words; the thread that waits steps the proxy, as where kernels run on a CPU
    kThreaded,  // the same, with a thread of its own for the proxy, as for kernels of a GPU
};

// The heap that this takes, which begins as zeros: in its region so many bytes of sources, as many of targets, and a
// word by which the ranks meet.
constexpr u64 kMeasuredBytes = 16ull << 20;
constexpr wire::HeapLayout measured_layout() { return {2, 1, 2 * kMeasuredBytes + wire::kPage, 0}; }

// Between rank 0 and rank 1.
class PutLoops {
  public:
    // Begin and end, in seconds of the steady clock.
    using Interval = std::pair<double, double>;

    PutLoops(Kind kind, const NetworkPlace& place);

    std::string name() const { return puts_->name(); }
    // Until the peer does the same: by words in memory that both have mapped, which is no traffic.
    void meet();
    // Puts `count` times `bytes`, of which at most `window` are under way. -> from the first one until all are
    // complete.
    Interval send(u64 bytes, u32 count, u32 window);
    // -> when so many of the peer's have arrived since all that were asked for before.
    double receive(u32 count);
    // Puts and waits for the answer, or the other way around where the peer is first.
    Interval round_trips(u64 bytes, u32 count, bool first);

  private:
    void wait(const std::function<bool()>& ready, const char* what);
    void put(u64 bytes);
    bool try_put(u64 bytes);
    u64* meeting_word(u32 rank) const;

    const NetworkPlace place_;
    const std::unique_ptr<Puts> puts_;
    u64 posted_ = 0, heard_ = 0, met_ = 0;
};

std::unique_ptr<Puts> make_proxy_puts(const NetworkPlace& place, bool threaded);
// Throws std::invalid_argument where this was built without libfabric.
std::unique_ptr<Puts> make_raw_puts(const NetworkPlace& place);

}  // namespace deep_ep::host::proxy
