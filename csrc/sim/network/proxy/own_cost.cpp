#include "sim/network/proxy/own_cost.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>

#include "host/network/looks.h"
#include "host/network/proxy/measure/command_writer.h"
#include "host/network/proxy/progress.h"
#include "observe/clock.h"
#include "sim/network/proxy/loopback.h"

namespace deep_ep::host::proxy {
namespace {

constexpr u32 kSelf = 0;
constexpr u64 kBytes = wire::kPieceBytes;

// The times of one put as recorded by the proxy's thread; 0: not yet. The other thread reads and clears them after it
// has seen all effects of the put; the release and acquire of the words that show these order the accesses.
struct Stamps {
    std::atomic<u64> posted{0}, completed{0}, arrived{0};
    static void set(std::atomic<u64>& stamp) { stamp.store(observe::monotonic_ns(), std::memory_order_relaxed); }
    static u64 take(std::atomic<u64>& stamp) { return stamp.exchange(0, std::memory_order_relaxed); }
};

class Stamped final : public Transport {
  public:
    Stamped(const NetworkPlace& place, Loopback::Random random, Stamps& stamps)
        : loopback_(place, std::move(random)), stamps_(stamps) {}

    std::string name() const override { return loopback_.name(); }
    u64 max_bytes() const override { return loopback_.max_bytes(); }
    bool post(const Message& message) override {
        Stamps::set(stamps_.posted);
        return loopback_.post(message);
    }
    bool takes(u32 peer) const override { return loopback_.takes(peer); }
    bool has_work() const override { return loopback_.has_work(); }
    bool poll(Events& events) override {
        const bool worked = loopback_.poll(events);
        if (!events.completions.empty()) Stamps::set(stamps_.completed);
        if (!events.arrivals.empty()) Stamps::set(stamps_.arrived);
        return worked;
    }
    std::string text(u32 error) const override { return loopback_.text(error); }

  private:
    Loopback loopback_;
    Stamps& stamps_;
};

// Messages arrive and complete at the next poll.
class AtOnce final : public Transport {
  public:
    std::string name() const override { return "no network"; }
    u64 max_bytes() const override { return 1 << 20; }
    bool post(const Message& message) override {
        posted_.completions.push_back({message.context});
        posted_.arrivals.push_back(message.immediate);
        return true;
    }
    bool has_work() const override { return !posted_.completions.empty(); }
    bool poll(Events& events) override {
        const bool worked = has_work();
        std::swap(posted_, events);
        return worked;
    }
    std::string text(u32) const override { return {}; }

  private:
    Events posted_;  // swapped with empty ones, whose memory is reused
};

// Pins the calling thread, and other threads on request, to single cores out of those that the calling thread may use.
// The destructor restores its affinity.
class Cores {
  public:
    Cores() {
        sched_getaffinity(0, sizeof(all_), &all_);
        for (int core = 0; core < CPU_SETSIZE; ++core) {
            if (CPU_ISSET(core, &all_)) cores_.push_back(core);
        }
        take(0);
    }
    ~Cores() { sched_setaffinity(0, sizeof(all_), &all_); }
    Cores(const Cores&) = delete;
    Cores& operator=(const Cores&) = delete;

    // For the calling thread.
    void take(size_t number) const {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cores_[number % cores_.size()], &one);
        sched_setaffinity(0, sizeof(one), &one);
    }

  private:
    cpu_set_t all_;
    std::vector<int> cores_;
};

// Steps a proxy as its own thread would, on another core than the calling thread: on the same core the two would
// preempt each other, since both are busy.
class Stepping {
  public:
    explicit Stepping(Progress& progress)
        : thread_([this, &progress] {
              cores_.take(1);
              Looks looks;
              while (!stopping_.load(std::memory_order_relaxed)) looks.note(progress.step());
          }) {}
    ~Stepping() {
        stopping_.store(true);
        thread_.join();
    }
    Stepping(const Stepping&) = delete;
    Stepping& operator=(const Stepping&) = delete;

  private:
    const Cores cores_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

// Bounds the waits, since the proxy may have failed.
class Patience {
  public:
    void check() {
        if (++looks_ % kLooks == 0 && observe::monotonic_ns() > until_) {
            throw std::runtime_error("the proxy: no progress on a command for 60 seconds");
        }
    }

  private:
    static constexpr u32 kLooks = 1 << 16;
    const u64 until_ = observe::monotonic_ns() + 60'000'000'000;
    u32 looks_ = 0;
};

// Records the time at which a condition is first seen to hold.
template <class Condition>
void note(u64& when, const Condition& holds) {
    if (when == 0 && holds()) when = observe::monotonic_ns();
}

}  // namespace

OwnCost own_cost(const NetworkPlace& place, u32 puts) {
    OwnCost cost;
    Stamps stamps;
    const auto random = [engine = std::mt19937()](u32 bound) mutable { return static_cast<u32>(engine() % bound); };
    Progress progress(place, std::make_unique<Stamped>(place, random, stamps), {observe::monotonic_ns, 0});
    const Stepping stepping(progress);
    CommandWriter commands(progress.state());
    const u64 at = place.layout.region_offset(0);
    const u64* const word = measured_word(place, kSelf);
    Patience patience;
    for (u64 put = 1; put <= puts; ++put) {
        const u64 begin = observe::monotonic_ns();
        commands.put(kSelf, kMeasuredWord, at, at + kBytes, kBytes);
        u64 signalled = 0, retired = 0;
        while (signalled == 0 || retired == 0) {
            note(signalled, [&] { return puts_in_word(word) == put; });
            note(retired, [&] { return commands.retired() == put; });
            patience.check();
        }
        const auto since = [](u64 end, u64 begin) { return static_cast<double>(end) - static_cast<double>(begin); };
        cost.command_to_post.push_back(since(Stamps::take(stamps.posted), begin));
        cost.completion_to_word.push_back(since(retired, Stamps::take(stamps.completed)));
        cost.arrival_to_word.push_back(since(signalled, Stamps::take(stamps.arrived)));
    }
    return cost;
}

double command_rate(const NetworkPlace& place, u32 count) {
    Progress progress(place, std::make_unique<AtOnce>(), {observe::monotonic_ns, 0});
    const Stepping stepping(progress);
    CommandWriter commands(progress.state());
    const u64* const word = measured_word(place, kSelf);
    Patience patience;
    const u64 at = place.layout.region_offset(0), begin = observe::monotonic_ns();
    for (u32 posted = 0; posted < count; patience.check()) {
        if (commands.put(kSelf, kMeasuredWord, at, at + kBytes, kBytes)) ++posted;
    }
    while (commands.retired() != count || puts_in_word(word) != count) patience.check();
    return count / (static_cast<double>(observe::monotonic_ns() - begin) / 1e9);
}

}  // namespace deep_ep::host::proxy
