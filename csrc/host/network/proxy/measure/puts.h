// The timed loops: puts from this rank to one peer and back over any carrier, so that the proxy and bare calls of the
// same provider are timed by the same loops. The peer is another process, which runs the other side of each loop.
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
    // Returns false if it accepts no put now.
    virtual bool post(u64 source, u64 target, u64 bytes) = 0;
    // Makes progress, or lets another thread make it.
    virtual void step() = 0;
    // The number of this rank's puts whose sources may be overwritten, and of the peer's puts that have fully arrived.
    virtual u64 completed() const = 0;
    virtual u64 arrived() const = 0;
};

enum class Kind {
    kRaw,       // libfabric's calls alone
    kStepped,   // commands, proxy, and words; the waiting thread steps the proxy, as when kernels run on a CPU
    kThreaded,  // the same, with a dedicated thread for the proxy, as for kernels on a GPU
};

// The heap that the loops need, initially zero. Its region has `kMeasuredBytes` of sources, as many of targets, and the
// word of the ranks' meeting.
constexpr u64 kMeasuredBytes = 16ull << 20;
constexpr wire::HeapLayout measured_layout() { return {2, 1, 2 * kMeasuredBytes + wire::kPage, 0}; }

// Between rank 0 and rank 1.
class PutLoops {
  public:
    // Begin and end, in seconds of the steady clock.
    using Interval = std::pair<double, double>;

    PutLoops(Kind kind, const NetworkPlace& place);

    std::string name() const { return puts_->name(); }
    // Waits until the peer does the same. Uses words in memory that both have mapped, which causes no network traffic.
    void meet();
    // Posts `count` puts of `bytes` each, at most `window` of them in flight. Returns the interval from the first post
    // until all are complete.
    Interval send(u64 bytes, u32 count, u32 window);
    // Waits for `count` more puts of the peer than previous calls have waited for. Returns when they have arrived.
    double receive(u32 count);
    // Puts and then waits for the answer, or the reverse if the peer is first.
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
// Throws std::invalid_argument in a build without libfabric.
std::unique_ptr<Puts> make_raw_puts(const NetworkPlace& place);

}  // namespace deep_ep::host::proxy
