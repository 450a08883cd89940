#include "host/control/machines/mesh.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>

#include "observe/clock.h"

namespace deep_ep::host {

using namespace wire::control;

namespace {

constexpr int kWake = -1;  // among ranks

void clear(int event) {
    u64 count;
    [[maybe_unused]] const ssize_t bytes = read(event, &count, sizeof(count));
}

template <class Payload>
bool as(std::string_view bytes, Payload& payload) {
    if (bytes.size() != sizeof(payload)) return false;
    std::memcpy(&payload, bytes.data(), sizeof(payload));
    return true;
}

}  // namespace

Mesh::Descriptor::Descriptor(int descriptor, const char* what) : descriptor_(descriptor) {
    if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), what);
}

Mesh::Descriptor::~Descriptor() { ::close(descriptor_); }

Mesh::Mesh(const std::vector<End>& ends)
    : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "an eventfd"),
      news_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "an eventfd"),
      ready_(epoll_create1(EPOLL_CLOEXEC), "an epoll descriptor") {
    std::map<std::string, size_t> machines;
    for (const End& end : ends) {
        const size_t machine = machines.emplace(end.machine, machines.size()).first->second;
        Peer& peer = *peers_.emplace(end.rank, std::make_unique<Peer>(end, machine)).first->second;
        watch(end.rank, peer, EPOLL_CTL_ADD);
    }
    machines_ = machines.size();
    epoll_event woken{EPOLLIN, {.fd = kWake}};
    if (epoll_ctl(ready_, EPOLL_CTL_ADD, wake_, &woken) != 0) {
        throw std::system_error(errno, std::generic_category(), "watching an eventfd");
    }
    thread_ = std::thread([this] { serve(); });
}

Mesh::~Mesh() {
    stopping_.store(true);
    set(wake_);
    thread_.join();
}

void Mesh::set(int event) {
    const u64 one = 1;
    [[maybe_unused]] const ssize_t bytes = write(event, &one, sizeof(one));
}

void Mesh::watch(int rank, Peer& peer, int operation) {
    epoll_event event{peer.waits_for_room ? EPOLLIN | EPOLLOUT : EPOLLIN, {.fd = rank}};
    if (epoll_ctl(ready_, operation, peer.link.socket(), &event) != 0) {
        throw std::system_error(errno, std::generic_category(), "watching a connection to another machine");
    }
}

std::vector<int> Mesh::ranks() const {
    std::vector<int> ranks;
    for (const auto& [rank, peer] : peers_) ranks.push_back(rank);
    return ranks;
}

Mesh::Peer* Mesh::find(int rank) const {
    const auto found = peers_.find(rank);
    return found == peers_.end() ? nullptr : found->second.get();
}

Mesh::State Mesh::state(int rank) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Peer* const peer = find(rank);
    return peer == nullptr ? State::kHeard : peer->state;
}

void Mesh::listen(Listener* listener) {
    {
        const std::lock_guard<std::mutex> lock(listening_);
        listener_ = listener;
        try {
            for (const int rank : ranks()) pass_on(rank);  // before this rank queries the state of others
        } catch (...) {
            listener_ = nullptr;
            throw;
        }
    }
    tell_beat();
}

void Mesh::tell(Kind kind, const void* payload, size_t bytes) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [rank, peer] : peers_) {
            if (!peer->link.open()) continue;
            peer->link.add(kind, payload, bytes);
            unsent_.push_back(rank);
        }
    }
    set(wake_);
}

void Mesh::tell_beat() {
    beat_due_.store(true);
    set(wake_);
}

void Mesh::confirm(u64 nanoseconds) {
    u64 number;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        number = ++asked_;
    }
    tell(kAsk, Question{number});
    std::unique_lock<std::mutex> lock(mutex_);
    answered_.wait_for(lock, std::chrono::nanoseconds(nanoseconds), [&] {
        return std::all_of(peers_.begin(), peers_.end(), [number](const auto& one) {
            return one.second->answered >= number || one.second->state != State::kHeard;
        });
    });
}

void Mesh::send(int rank, const std::string& message) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        Peer* const peer = find(rank);
        if (peer == nullptr || !peer->link.open()) return;
        peer->link.add(kMessage, message.data(), message.size());
        unsent_.push_back(rank);
    }
    set(wake_);
}

std::optional<std::string> Mesh::receive(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Peer* const peer = find(rank);
    if (peer == nullptr || peer->messages.empty()) return std::nullopt;
    std::string message = std::move(peer->messages.front());
    peer->messages.pop_front();
    return message;
}

bool Mesh::has_news(int rank) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Peer* const peer = find(rank);
    return peer != nullptr && (!peer->messages.empty() || peer->state != State::kHeard);
}

void Mesh::clear_news() { clear(news_); }

void Mesh::drop(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Peer* const peer = find(rank);
    if (peer == nullptr || !peer->link.open()) return;
    peer->link.send();
    end(*peer, State::kEnded);
    show_end(*peer);
}

void Mesh::close_in_child() {
    for (const auto& [rank, peer] : peers_) peer->link.close();  // without the lock: it may have been held at the fork
}

// --- the thread

void Mesh::serve() {
    try {
        serve_until_stopped();
    } catch (...) {
        // Messages to this rank can no longer be processed. It has lost the others, and its calls report so.
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [rank, peer] : peers_) {
            if (!peer->link.open()) continue;
            end(*peer, State::kEnded);
            show_end(*peer);
        }
    }
}

void Mesh::serve_until_stopped() {
    u64 beaten = 0;
    for (u64 looked = observe::monotonic_ns(); !stopping_.load();) {
        const u64 due = beaten + kBeatNs;
        const std::vector<int> ready = wait(due > looked ? due - looked : 0);
        // Received data is read before silence is judged, and time in which this thread did not run is not silence:
        // this process may have been stopped, and the others with it.
        const u64 now = observe::monotonic_ns();
        if (now - looked > 2 * kBeatNs) {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const auto& [rank, peer] : peers_) {
                if (peer->heard_ns != 0) peer->heard_ns = now;
            }
            resumed_ns_ = now;
        }
        looked = now;
        for (const int rank : ready) take(rank);
        {
            const std::lock_guard<std::mutex> listening(listening_);
            for (const int rank : ready) pass_on(rank);
        }
        if (beat_due_.exchange(false) || now >= due) {
            judge(now);
            add_beats();
            beaten = now;
        }
        send_all();
    }
    send_all();
}

// Returns the ranks from which data has arrived, or to which sending is possible again.
std::vector<int> Mesh::wait(u64 nanoseconds) {
    epoll_event events[64];
    const int count = epoll_wait(ready_, events, std::size(events), static_cast<int>(nanoseconds / 1'000'000 + 1));
    std::vector<int> ranks;
    for (int i = 0; i < count; ++i) {
        if (events[i].data.fd == kWake) {
            clear(wake_);
        } else {
            ranks.push_back(events[i].data.fd);
        }
    }
    return ranks;
}

void Mesh::take(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Peer& peer = *find(rank);
    if (!peer.link.open()) return;
    if (peer.waits_for_room) unsent_.push_back(rank);
    const auto one = [&](Kind kind, std::string_view payload) { take(peer, kind, payload); };
    if (!peer.link.take(one)) end(peer, peer.comes_to == State::kHeard ? State::kEnded : peer.comes_to);
}

void Mesh::take(Peer& peer, Kind kind, std::string_view payload) {
    peer.heard_ns = observe::monotonic_ns();
    Question question{};
    if (kind == kMessage) {
        peer.messages.emplace_back(payload);
        set(news_);
    } else if (kind == kAnswer && as(payload, question)) {
        peer.answered = std::max(peer.answered, question.number);
        answered_.notify_all();
    } else if (kind == kUnheard) {
        peer.comes_to = State::kUnheard;  // its end follows
    } else if (kind != kBeat || !payload.empty()) {
        peer.told.push_back({kind, std::string(payload)});
    }
}

// Passes messages on in order, and without the lock, so that this rank may send meanwhile. Messages that arrive before
// there is a listener wait for one. The end of a rank is shown after all its messages, so that a rank that has left is
// not taken for one that has died.
void Mesh::pass_on(int from) {
    Peer& peer = *find(from);
    std::deque<Told> all;
    if (listener_ != nullptr) {
        const std::lock_guard<std::mutex> lock(mutex_);
        all.swap(peer.told);
    }
    for (const Told& told : all) pass_on(from, told);
    const std::lock_guard<std::mutex> lock(mutex_);
    show_end(peer);
}

void Mesh::pass_on(int from, const Told& told) {
    Beat beat{};
    Abort abort{};
    wire::RecoveryWord stage{};
    wire::NetworkAddress address{};
    Question question{};
    if (told.kind == kBeat && as(told.payload, beat)) listener_->beat(from, beat);
    if (told.kind == kAbort && as(told.payload, abort)) listener_->abort(abort);
    if (told.kind == kStage && as(told.payload, stage)) listener_->stage(from, stage);
    if (told.kind == kAddress && as(told.payload, address)) listener_->address(from, address);
    if (told.kind == kAsk && as(told.payload, question)) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Peer* const peer = find(from);
        if (!peer->link.open()) return;
        peer->link.add(kAnswer, &question, sizeof(question));
        unsent_.push_back(from);
    }
}

void Mesh::add_beats() {
    std::optional<Beat> beat;
    {
        const std::lock_guard<std::mutex> listening(listening_);
        if (listener_ != nullptr) beat = listener_->own_beat();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, peer] : peers_) {
        if (!peer->link.open()) continue;
        peer->link.add(kBeat, beat ? &*beat : nullptr, beat ? sizeof(*beat) : 0);
        unsent_.push_back(rank);
    }
}

void Mesh::send_all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const int rank : unsent_) {
        Peer& peer = *find(rank);
        if (!peer.link.open()) continue;
        peer.link.send();
        if (peer.waits_for_room == peer.link.has_unsent()) continue;
        peer.waits_for_room = peer.link.has_unsent();
        watch(rank, peer, EPOLL_CTL_MOD);
    }
    unsent_.clear();
}

// A rank that has sent nothing yet may still be meeting others. In that case acknowledgments by the operating system of
// its machine show whether it is there.
bool Mesh::is_quiet(const Peer& peer, u64 now) const {
    if (peer.heard_ns == 0) return now > resumed_ns_ + kSilentNs && peer.link.unacknowledged_ns() > kSilentNs;
    return now > peer.heard_ns + kSilentNs;
}

void Mesh::judge(u64 now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<bool> heard(machines_);
    for (const auto& [rank, peer] : peers_) {
        if (peer->link.open() && !is_quiet(*peer, now)) heard[peer->machine] = true;
    }
    for (const auto& [rank, peer] : peers_) {
        if (!peer->link.open() || heard[peer->machine]) continue;
        peer->link.add(kUnheard, nullptr, 0);
        peer->link.send();
        end(*peer, State::kSilent);
        show_end(*peer);
    }
}

void Mesh::end(Peer& peer, State state) {
    // A forked child may have a copy of the socket, in which case closing it does not remove it from the epoll set.
    epoll_ctl(ready_, EPOLL_CTL_DEL, peer.link.socket(), nullptr);
    peer.link.close();
    peer.comes_to = state;
}

void Mesh::show_end(Peer& peer) {
    if (peer.link.open() || peer.state == peer.comes_to) return;
    peer.state = peer.comes_to;
    answered_.notify_all();
    set(news_);
}

}  // namespace deep_ep::host
