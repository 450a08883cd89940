#include "host/control/machines/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace deep_ep::host {

using namespace wire::control;

namespace {

u64 now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<u64>(std::chrono::nanoseconds(now).count());
}

int new_event() { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }

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

Mesh::Mesh(const std::vector<End>& ends) : wake_(new_event()), news_(new_event()) {
    for (const End& end : ends) peers_.emplace(end.rank, std::make_unique<Peer>(end));
    thread_ = std::thread([this] { serve(); });
}

Mesh::~Mesh() {
    stopping_.store(true);
    signal(wake_);
    thread_.join();
    ::close(wake_);
    ::close(news_);
}

void Mesh::signal(int descriptor) {
    const u64 one = 1;
    [[maybe_unused]] const ssize_t bytes = write(descriptor, &one, sizeof(one));
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
        pass_on_all();  // before this rank asks how others are
    }
    tell_beat();
}

void Mesh::tell(Kind kind, const void* payload, size_t bytes) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [rank, peer] : peers_) {
            if (peer->link.open()) peer->link.add(kind, payload, bytes);
        }
    }
    signal(wake_);
}

void Mesh::tell_beat() {
    beat_due_.store(true);
    signal(wake_);
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
        if (peer != nullptr && peer->link.open()) peer->link.add(kMessage, message.data(), message.size());
    }
    signal(wake_);
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
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        Peer* const peer = find(rank);
        if (peer == nullptr || !peer->link.open()) return;
        peer->link.send();
        end(*peer, State::kEnded);
    }
    signal(wake_);
}

void Mesh::close_in_child() {
    for (const auto& [rank, peer] : peers_) peer->link.close();  // without the lock, which a thread may have held
}

// --- the thread

void Mesh::serve() {
    u64 beaten = 0;
    while (!stopping_.load()) {
        const u64 due = beaten + kBeatNs, before = now_ns();
        wait(due > before ? due - before : 0);
        // What has come is read before silence is judged: it may be this process that was stopped.
        take_all();
        const u64 now = now_ns();
        judge(now);
        pass_on();
        show_ends();
        if (beat_due_.exchange(false) || now >= beaten + kBeatNs) {
            add_beats();
            beaten = now;
        }
        send_all();
    }
    send_all();
}

void Mesh::wait(u64 nanoseconds) {
    std::vector<pollfd> polled{{wake_, POLLIN, 0}};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [rank, peer] : peers_) {
            const short events = peer->link.has_unsent() ? POLLIN | POLLOUT : POLLIN;
            if (peer->link.open()) polled.push_back({peer->link.socket(), events, 0});
        }
    }
    poll(polled.data(), polled.size(), static_cast<int>(nanoseconds / 1'000'000 + 1));
    clear(wake_);
}

void Mesh::take_all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, peer] : peers_) {
        if (!peer->link.open()) continue;
        Peer& from = *peer;
        const auto one = [&](Kind kind, std::string_view payload) { take(from, kind, payload); };
        if (!from.link.take(one)) end(from, State::kEnded);
    }
}

void Mesh::take(Peer& peer, Kind kind, std::string_view payload) {
    peer.heard_ns = now_ns();
    Question question{};
    if (kind == kMessage) {
        peer.messages.emplace_back(payload);
        signal(news_);
    } else if (kind == kAnswer && as(payload, question)) {
        peer.answered = std::max(peer.answered, question.number);
        answered_.notify_all();
    } else if (kind != kBeat || !payload.empty()) {
        peer.told.push_back({kind, std::string(payload)});
    }
}

// In order, and without the lock, so that this rank may tell something meanwhile. What comes before anything listens
// waits for that.
void Mesh::pass_on() {
    const std::lock_guard<std::mutex> listening(listening_);
    pass_on_all();
}

void Mesh::pass_on_all() {
    if (listener_ == nullptr) return;
    for (const auto& [rank, peer] : peers_) {
        std::deque<Peer::Told> all;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            all.swap(peer->told);
        }
        for (const Peer::Told& told : all) pass_on(rank, told);
    }
}

void Mesh::pass_on(int from, const Peer::Told& told) {
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
        if (peer->link.open()) peer->link.add(kAnswer, &question, sizeof(question));
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
        if (peer->link.open()) peer->link.add(kBeat, beat ? &*beat : nullptr, beat ? sizeof(*beat) : 0);
    }
}

void Mesh::send_all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, peer] : peers_) {
        if (peer->link.open()) peer->link.send();
    }
}

void Mesh::judge(u64 now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<std::string, bool> silent;
    for (const auto& [rank, peer] : peers_) {
        if (!peer->link.open()) continue;
        const bool quiet = peer->heard_ns != 0 && now - peer->heard_ns > kSilentNs;
        const auto [found, first] = silent.emplace(peer->machine, quiet);
        if (!first) found->second = found->second && quiet;
    }
    for (const auto& [rank, peer] : peers_) {
        if (peer->link.open() && silent[peer->machine]) end(*peer, State::kSilent);
    }
}

void Mesh::end(Peer& peer, State state) {
    peer.link.close();
    peer.comes_to = state;
}

// After all that these ranks have told has been passed on: one that has left is not taken for one that has died.
void Mesh::show_ends() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, peer] : peers_) {
        if (peer->state == peer->comes_to) continue;
        peer->state = peer->comes_to;
        answered_.notify_all();
        signal(news_);
    }
}

}  // namespace deep_ep::host
