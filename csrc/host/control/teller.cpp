#include "host/control/teller.h"

#include <chrono>

#include "observe/observer.h"
#include "wire/signals.h"

namespace deep_ep::host {
namespace {

// Costs less than half a percent of a core as long as a Buffer exists.
constexpr auto kTellerNap = std::chrono::milliseconds(5);

}  // namespace

// Stored by the claiming thread of a kernel. Relaxed, since only the word itself is passed on.
bool Teller::claims() const {
    observe::look(observe::host(static_cast<u32>(others_.rank)), claimed_);
    return __atomic_load_n(claimed_, __ATOMIC_RELAXED) != told_;
}

// Returns the word that other hosts have stored, or 0 for one of an older generation. Relaxed, as above.
uint64_t Teller::hears() const {
    const uint64_t word = others_.told != nullptr ? __atomic_load_n(others_.told, __ATOMIC_RELAXED) : 0;
    return wire::abort_generation(word) >= others_.generation ? word : 0;
}

bool Teller::due() const { return claims() || (hears() != 0 && hears() != heard_); }

void Teller::tell() noexcept {
    if (const uint64_t heard = hears(); heard != 0 && heard != heard_) {
        heard_ = heard;
        try {
            memory_->store_words({others_.own}, heard);
        } catch (...) {
        }
    }
    if (!claims()) return;
    told_ = __atomic_load_n(claimed_, __ATOMIC_RELAXED);
    // The others have masked this rank and continue without it.
    if (wire::abort_reason(told_) == wire::kMasked) return;
    try {
        if (others_.further) others_.further(told_);
        memory_->store_words(others_.words, told_);
    } catch (...) {
    }
}

TellerThread::TellerThread(const uint64_t* claimed, Others others, std::unique_ptr<Memory> memory)
    : Teller(claimed, std::move(others), std::move(memory)), thread_([this] { serve(); }) {}

TellerThread::~TellerThread() {
    stopping_.store(true);
    thread_.join();
    if (due()) tell();  // claimed since the last poll
}

void TellerThread::serve() {
    while (!stopping_.load(std::memory_order_relaxed)) {
        if (due()) tell();
        std::this_thread::sleep_for(kTellerNap);
    }
}

}  // namespace deep_ep::host
