#include "meeting.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "shared_file.h"

namespace nvshmem_double {
namespace {

// Marks a PE that has given up; not a count of meetings.
constexpr uint64_t kGone = ~0ull;

}  // namespace

struct Meeting::Said {
    char call[48];
    uint64_t first, second;
};

struct alignas(64) Meeting::Slot {
    uint64_t came;  // number of meetings it has reached
    // Two buffers in turn: a PE may be one meeting ahead of another that still reads, but not two.
    Said said[2];
};

Meeting::Meeting(const std::string& folder, int pe, int pes, double seconds)
    : pe_(pe), pes_(pes), seconds_(seconds), bytes_(static_cast<size_t>(pes) * sizeof(Slot)) {
    memory_ = map_shared(folder + "/meeting", bytes_, 1);
}

Meeting::~Meeting() { unmap_shared(memory_, bytes_); }

Meeting::Slot* Meeting::slot(int pe) const { return static_cast<Slot*>(memory_) + pe; }

void Meeting::give_up(const std::string& call, const std::string& why) {
    met_ = kGone;
    // Relaxed: it only says that this PE will not come.
    __atomic_store_n(&slot(pe_)->came, kGone, __ATOMIC_RELAXED);
    throw Failure(kInternal, call + " on PE " + std::to_string(pe_) + ": " + why);
}

void Meeting::meet(const std::string& call, uint64_t first, uint64_t second) {
    if (met_ == kGone) give_up(call, "this PE has given up an earlier collective call");
    const uint64_t turn = ++met_;
    Said& mine = slot(pe_)->said[turn % 2];
    mine = {};
    std::strncpy(mine.call, call.c_str(), sizeof(mine.call) - 1);
    mine.first = first;
    mine.second = second;
    // Release: pairs with the acquire of the other PEs below, which then see what is said here and all earlier writes.
    __atomic_store_n(&slot(pe_)->came, turn, __ATOMIC_RELEASE);
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds_);
    const auto missing = [&] {
        std::string names;
        for (int pe = 0; pe < pes_; ++pe) {
            // Acquire: pairs with the release of that PE above.
            const uint64_t came = __atomic_load_n(&slot(pe)->came, __ATOMIC_ACQUIRE);
            if (came == kGone) give_up(call, "PE " + std::to_string(pe) + " has given up");
            if (came < turn) names += (names.empty() ? "" : ", ") + std::to_string(pe);
        }
        return names;
    };
    for (std::string names = missing(); !names.empty(); names = missing()) {
        if (std::chrono::steady_clock::now() > until) {
            give_up(call, "has waited " + std::to_string(static_cast<int>(seconds_)) + " s for PE " + names +
                              ": the call is collective");
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    for (int pe = 0; pe < pes_; ++pe) {
        const Said& other = slot(pe)->said[turn % 2];
        if (std::strcmp(other.call, mine.call) == 0 && other.first == first && other.second == second) continue;
        const auto shown = [](const Said& said) {
            return std::string(said.call) + "(" + std::to_string(said.first) + ", " + std::to_string(said.second) + ")";
        };
        throw Failure(kSymmetry, "PE " + std::to_string(pe_) + " has called " + shown(mine) + ", PE " +
                                     std::to_string(pe) + " " + shown(other) + ": all PEs must call the same");
    }
}

}  // namespace nvshmem_double
