#include "host/cuda/stream_launcher.h"

#include <sched.h>

#include "observe/clock.h"

namespace deep_ep::host {
namespace {

constexpr uint64_t kForever = UINT64_MAX;
constexpr unsigned kLooksPerCheck = 256;  // checks of the stream and of signals are slower than `ready`

}  // namespace

void StreamLauncher::wait(const std::function<bool()>& ready, const char* what) { wait_for(ready, what, kForever); }

bool StreamLauncher::wait_for(const std::function<bool()>& ready, const char*, uint64_t nanoseconds) {
    const uint64_t began = observe::monotonic_ns();
    for (unsigned looks = 1; !ready(); ++looks) {
        if (nanoseconds != kForever && observe::monotonic_ns() - began >= nanoseconds) return false;
        if (looks % kLooksPerCheck != 0) continue;
        check();
        sched_yield();
    }
    return true;
}

}  // namespace deep_ep::host
