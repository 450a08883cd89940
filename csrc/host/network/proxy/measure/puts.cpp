#include "host/network/proxy/measure/puts.h"

#include <chrono>
#include <stdexcept>

namespace deep_ep::host::proxy {
namespace {

constexpr double kPatience = 60;  // seconds
constexpr u32 kTurnsPerLook = 1024;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void check_bytes(u64 bytes) {
    if (bytes != 0 && bytes % wire::kPieceBytes == 0 && bytes <= kMeasuredBytes) return;
    throw std::invalid_argument("bytes=" + std::to_string(bytes) + ": expected a multiple of 16, up to " +
                                std::to_string(kMeasuredBytes));
}

std::unique_ptr<Puts> make_puts(Kind kind, const NetworkPlace& place) {
    return kind == Kind::kRaw ? make_raw_puts(place) : make_proxy_puts(place, kind == Kind::kThreaded);
}

}  // namespace

PutLoops::PutLoops(Kind kind, const NetworkPlace& place) : place_(place), puts_(make_puts(kind, place)) {}

u64* PutLoops::meeting_word(u32 rank) const {
    return reinterpret_cast<u64*>(place_.heaps[rank] + place_.layout.region_offset(0) + 2 * kMeasuredBytes);
}

// Bounded, since the peer may have ended.
void PutLoops::wait(const std::function<bool()>& ready, const char* what) {
    const double until = now() + kPatience;
    for (u32 turn = 1; !ready(); ++turn) {
        puts_->step();
        if (turn % kTurnsPerLook == 0 && now() > until) {
            throw std::runtime_error(std::string(what) + ": no progress for 60 seconds");
        }
    }
}

void PutLoops::meet() {
    const u32 self = static_cast<u32>(place_.rank);
    // The peer acquires it, so that this rank's earlier stores to its heap are visible to the peer.
    __atomic_store_n(meeting_word(self), ++met_, __ATOMIC_RELEASE);
    // Pairs with the peer's release.
    wait([&] { return __atomic_load_n(meeting_word(1 - self), __ATOMIC_ACQUIRE) >= met_; }, "a meeting");
}

bool PutLoops::try_put(u64 bytes) {
    const u64 at = place_.layout.region_offset(0) + posted_ % (kMeasuredBytes / bytes) * bytes;
    if (!puts_->post(at, at + kMeasuredBytes, bytes)) return false;
    ++posted_;
    return true;
}

void PutLoops::put(u64 bytes) {
    wait([&] { return try_put(bytes); }, "a post");
}

PutLoops::Interval PutLoops::send(u64 bytes, u32 count, u32 window) {
    check_bytes(bytes);
    if (window == 0) throw std::invalid_argument("window=0: expected at least 1");
    const double begin = now();
    const u64 all = posted_ + count;
    const auto done = [&] {
        while (posted_ < all && posted_ - puts_->completed() < window && try_put(bytes)) {
        }
        return puts_->completed() == all;
    };
    wait(done, "completions");
    return {begin, now()};
}

double PutLoops::receive(u32 count) {
    heard_ += count;
    wait([&] { return puts_->arrived() >= heard_; }, "puts of the peer");
    return now();
}

PutLoops::Interval PutLoops::round_trips(u64 bytes, u32 count, bool first) {
    check_bytes(bytes);
    const double begin = now();
    for (u32 i = 0; i < count; ++i) {
        if (first) put(bytes);
        receive(1);
        if (!first) put(bytes);
    }
    const double end = now();
    wait([&] { return puts_->completed() == posted_; }, "completions");
    return {begin, end};
}

}  // namespace deep_ep::host::proxy
