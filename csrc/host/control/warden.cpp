#include "host/control/warden.h"

#include <algorithm>
#include <chrono>

#include "observe/observer.h"
#include "wire/masked_ranks.h"

namespace deep_ep::host {
namespace {

constexpr auto kWardenNap = std::chrono::milliseconds(5);
constexpr int kSilentSteps = 3;

}  // namespace

Warden::Warden(WardenPost post, std::unique_ptr<Memory> memory, const MakeControl& make_control)
    : post_(std::move(post)),
      memory_(std::move(memory)),
      control_(make_control(*memory_)),
      known_(static_cast<size_t>(post_.ranks)),
      mail_(control_->mail()) {
    control_->watch(post_.lifelines);
    // A peer may have begun this generation earlier and may already have masked a rank.
    const std::lock_guard<std::mutex> guard(mutex_);
    publish(control_->told_masks(post_.generation));
}

// Stored by this rank's kernels; no other data depends on the words.
uint64_t Warden::told_of(int rank) const {
    observe::look(observe::host(static_cast<u32>(post_.rank)), post_.suspects + rank);
    return __atomic_load_n(post_.suspects + rank, __ATOMIC_RELAXED);
}

bool Warden::counts(int rank) const {
    const u32 bit = static_cast<u32>(rank);
    return rank != post_.rank && !post_.left_out.has(bit) && !masked_.has(bit);
}

// A rank that has failed or is masked itself masks none.
bool Warden::broken() const { return wire::abort_generation(control_->failure(post_.generation)) >= post_.generation; }

bool Warden::lost(int rank) const {
    const auto by = [&](bool left) {
        return post_.progress.is_lost(*control_, *memory_, post_.generation, rank, left);
    };
    return by(false) || by(true);
}

// Checks, once for each step of the longest wait here, which ranks still report something new.
void Warden::listen() {
    uint64_t longest = 0;
    for (int rank = 0; rank < post_.ranks; ++rank) longest = std::max(longest, counts(rank) ? told_of(rank) : 0);
    const bool stepped = longest > longest_;
    longest_ = longest;
    for (int rank = 0; stepped && rank < post_.ranks; ++rank) {
        Known& known = known_[static_cast<size_t>(rank)];
        const uint64_t waiting = control_->waiting(rank);
        known.silent = waiting == known.waiting ? known.silent + 1 : 0;
        known.waiting = waiting;
    }
}

// Whether the rank reports a wait and keeps doing so. The last report of a rank that has died never changes.
bool Warden::waits(int rank) const {
    const Known& known = known_[static_cast<size_t>(rank)];
    return known.waiting != 0 && known.silent < kSilentSteps;
}

// The latest operation for which a rank may have sent its part. Excludes the one in which it waits for regions.
int64_t Warden::sent(int rank) const {
    const auto at = static_cast<int64_t>(wire::announced_operation(control_->announcement(rank)));
    return waits(rank) && wire::waits_for_free(known_[static_cast<size_t>(rank)].waiting) ? at - 1 : at;
}

// The operation whose part a rank waits for another rank to send or finish.
int64_t Warden::needed(int rank) const {
    const auto at = static_cast<int64_t>(wire::announced_operation(control_->announcement(rank)));
    return wire::waits_for_free(known_[static_cast<size_t>(rank)].waiting) ? at - post_.progress.heap.regions : at;
}

// The number of ranks that wait for a rank although it may have sent what they wait for. Waits for a rank that is
// merely behind do not count: it keeps all others waiting, which says nothing about the cause.
int Warden::waiters_for(int rank) const {
    int waiters = 0;
    for (int other = 0; other < post_.ranks; ++other) {
        if (other != post_.rank && !counts(other)) continue;
        const bool waits_for_it = waits(other) && wire::waited_for(known_[static_cast<size_t>(other)].waiting) == rank;
        waiters += waits_for_it && needed(other) <= sent(rank);
    }
    return waiters;
}

// A rank has an excuse if it is compiling its kernels, or is waiting for a rank that others must judge. Of two ranks
// that wait for each other, the one that more ranks wait for has none; with equal numbers, the higher one. A rank that
// most ranks wait for is itself cut off.
bool Warden::excused(int rank) const {
    if (control_->compiling(rank)) return true;
    if (!waits(rank)) return false;
    const int other = wire::waited_for(known_[static_cast<size_t>(rank)].waiting);
    const int for_rank = waiters_for(rank);
    if (other == post_.rank) {
        const int for_this = waiters_for(post_.rank);
        return for_this != for_rank ? for_this > for_rank : rank < post_.rank;
    }
    int living = 1;
    for (int one = 0; one < post_.ranks; ++one) living += counts(one);
    const bool cut_off = 2 * for_rank > living - 1;
    return !cut_off && other >= 0 && other < post_.ranks && other != rank && counts(other);
}

bool Warden::guilty(int rank) {
    Known& known = known_[static_cast<size_t>(rank)];
    const uint64_t told = told_of(rank);
    if (told == known.seen) return false;
    known.seen = told;
    if (told >= wire::kInexcusable) return true;
    if (told < wire::kSuspect || excused(rank)) {
        known.accused = 0;
    } else if (known.accused == 0) {
        known.accused = told;  // its excuse may still be in flight
    } else {
        return told > known.accused;
    }
    return false;
}

// Checks the reports of kernels here first: other memory needs to be read only if they wait.
bool Warden::due() const noexcept {
    try {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock) return false;
        bool waiting = false, told_anew = false;
        for (int rank = 0; rank < post_.ranks; ++rank) {
            if (!counts(rank)) continue;
            const uint64_t told = told_of(rank);
            waiting = waiting || told != 0;
            told_anew = told_anew || told != known_[static_cast<size_t>(rank)].seen;
        }
        if ((!waiting && !told_anew) || broken()) return false;
        if (told_anew || control_->mail() != mail_) return true;
        for (int rank = 0; rank < post_.ranks; ++rank) {
            if (counts(rank) && told_of(rank) != 0 && lost(rank)) return true;
        }
    } catch (...) {
    }
    return false;
}

void Warden::serve() noexcept {
    try {
        const std::lock_guard<std::mutex> guard(mutex_);
        if (broken()) return;
        read_mail();
        judge();
    } catch (...) {
    }
}

void Warden::judge() {
    listen();
    wire::RankMask more{};
    bool any = false;
    for (int rank = 0; rank < post_.ranks; ++rank) {
        if (!counts(rank)) continue;
        const bool waited_for = told_of(rank) != 0;
        if (!guilty(rank) && !(waited_for && lost(rank))) continue;
        more.add(static_cast<u32>(rank));
        any = true;
    }
    if (any) add(more);
}

void Warden::read_mail() {
    const uint64_t mail = control_->mail();
    if (mail == mail_) return;
    mail_ = mail;
    publish(control_->told_masks(post_.generation));
}

void Warden::add(const wire::RankMask& more) {
    for (int rank = 0; rank < post_.ranks; ++rank) {
        const u32 bit = static_cast<u32>(rank);
        if (!more.has(bit)) continue;
        if (broken()) return;  // this rank may have been masked since the last check
        const u32 self = static_cast<u32>(post_.rank);
        control_->tell_masked(rank, wire::abort_word(post_.generation, wire::kMasked, self, rank), post_.generation);
        mine_.add(bit);
    }
    control_->tell_masks(mine_, post_.generation);
    publish(more);
}

// Publishes masks to this rank's kernels. This resets their reports about other ranks: waits begin anew.
void Warden::publish(const wire::RankMask& more) {
    bool any = false;
    for (int rank = 0; rank < post_.ranks; ++rank) {
        if (!more.has(static_cast<u32>(rank)) || !counts(rank)) continue;
        masked_.add(static_cast<u32>(rank));
        any = true;
    }
    if (!any) return;
    for (int rank = 0; rank < post_.ranks; ++rank) {
        // Kernels here store it too, when their waits have lasted another step; no other data depends on the words.
        __atomic_store_n(post_.suspects + rank, 0, __ATOMIC_RELAXED);
        known_[static_cast<size_t>(rank)] = {};
    }
    control_->tell_own_masks(masked_, ++changes_);
}

bool Warden::mask(int rank) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (broken()) return false;
    wire::RankMask more{};
    more.add(static_cast<u32>(rank));
    if (counts(rank)) add(more);
    return true;
}

wire::RankMask Warden::masked() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!broken()) read_mail();
    return masked_;
}

void Warden::watch(Lifelines lifelines) {
    const std::lock_guard<std::mutex> guard(mutex_);
    control_->watch(std::move(lifelines));
}

WardenThread::WardenThread(WardenPost post, std::unique_ptr<Memory> memory, const MakeControl& make_control)
    : Warden(std::move(post), std::move(memory), make_control), thread_([this] {
          while (!stopping_.load(std::memory_order_relaxed)) {
              if (due()) serve();
              std::this_thread::sleep_for(kWardenNap);
          }
      }) {}

WardenThread::~WardenThread() {
    stopping_.store(true);
    thread_.join();
}

}  // namespace deep_ep::host
