#include "host/network/proxy/sender.h"

#include <algorithm>
#include <utility>

namespace deep_ep::host::proxy {

using namespace wire::proxy;

void Sender::Window::end(u64 number) {
    beyond |= u64{1} << (number - delivered);
    while ((beyond & 1) != 0) {
        beyond >>= 1;
        ++delivered;
    }
}

Sender::Sender(u32 rank, u32 ranks, u32 generation, u64 scratch, CommandRings& rings, Transport& transport,
               std::function<bool(u32)> closed)
    : rank_(rank),
      generation_(generation),
      scratch_(scratch),
      rings_(rings),
      transport_(transport),
      closed_(std::move(closed)),
      links_(ranks),
      put_messages_(rings.count()),
      counters_(ranks) {}

bool Sender::take(u32 commands) {
    bool took = false;
    Taken taken;
    for (u32 ring = 0; ring < rings_.count(); ++ring) {
        for (u32 i = 0; i < commands && rings_.take(ring, taken); ++i) {
            accept(taken);
            took = true;
        }
    }
    return took;
}

// Splits a command into as many messages as the transport's size limit requires. The last message of a put says how
// many there were, so that the receiver knows when it has all of them (share()). A put without bytes is one message, to
// a place that is never read.
void Sender::accept(const Taken& taken) {
    const u32 peer = peer_of(taken.command), operation = operation_of(taken.command);
    Link& link = links_[peer];
    if (operation == kNothing || link.dead || closed_(peer)) {
        const bool lost = operation != kNothing && !closed_(peer);
        if (operation != kPart) put_messages_[taken.place.ring] = 0;
        rings_.begin(taken.place, lost ? 1 : 0);
        if (lost) link.lost.push_back(taken.place);
        return;
    }
    if (link.windows.empty()) link.windows.resize(kWords);
    const u64 bytes = bytes_of(taken.command), most = transport_.max_bytes();
    const bool ends = operation != kPart, moves = operation != kSignal && bytes != 0;
    const u32 cuts = moves ? static_cast<u32>((bytes + most - 1) / most) : ends ? 1 : 0;
    u32& of_put = put_messages_[taken.place.ring];
    rings_.begin(taken.place, cuts);
    for (u32 cut = 0; cut < cuts; ++cut) {
        ++of_put;
        const u64 at = cut * most;
        Message message{peer, 0, scratch_, scratch_, wire::kPieceBytes, 0};
        if (moves) {
            message.source = source_of(taken.command) + at;
            message.target = target_of(taken.command) + at;
            message.bytes = std::min(most, bytes - at);
        }
        const u32 pieces = ends && cut + 1 == cuts ? of_put : 0;
        if (link.queue.empty()) ++waiting_;
        link.queue.push_back({message, word_of(taken.command), pieces, taken.place});
    }
    if (ends) of_put = 0;
}

// Messages that wait for a failed link do not count as done: kernels that wait for them find the fault (quiet).
void Sender::lose(Link& link) {
    if (!link.queue.empty()) --waiting_;
    for (const Waiting& waiting : link.queue) link.lost.push_back(waiting.of);
    link.queue.clear();
}

// Nothing waits any longer for messages to a peer that is masked or has left.
void Sender::forget(Link& link) {
    lose(link);
    for (const CommandPlace& place : link.lost) rings_.end_message(place);
    link.lost.clear();
}

bool Sender::may_post(u32 peer, const Link& link) const {
    if (closed_(peer)) return !link.queue.empty() || !link.lost.empty();
    if (link.queue.empty()) return false;
    const Waiting& next = link.queue.front();
    const bool fits = link.bytes_on_their_way == 0 || link.bytes_on_their_way + next.message.bytes <= kMaxBytesToPeer;
    return fits && link.windows[next.word].open() && transport_.takes(peer);
}

bool Sender::post_next(u32 peer, Link& link) {
    const Waiting& next = link.queue.front();
    Window& window = link.windows[next.word];
    if (free_places_.empty()) {
        free_places_.push_back(static_cast<u32>(on_their_way_.size()));
        on_their_way_.emplace_back();
    }
    Message message = next.message;
    message.context = free_places_.back();
    message.immediate = pack({rank_, next.word, generation_, static_cast<u32>(window.sent), next.pieces});
    if (!transport_.post(message)) return false;
    on_their_way_[free_places_.back()] = {peer, next.word, window.sent++, message.bytes, next.of};
    free_places_.pop_back();
    link.bytes_on_their_way += message.bytes;
    ++counters_[peer].writes;
    counters_[peer].bytes += message.bytes;
    link.queue.pop_front();
    if (link.queue.empty()) --waiting_;
    return true;
}

bool Sender::post() {
    bool posted = false;
    for (u32 peer = 0; (waiting_ != 0 || dead_ != 0) && peer < links_.size(); ++peer) {
        Link& link = links_[peer];
        while (may_post(peer, link)) {
            if (closed_(peer)) {
                forget(link);
            } else if (!post_next(peer, link)) {
                break;
            }
            posted = true;
        }
    }
    return posted;
}

bool Sender::has_work() const {
    if (rings_.has_next()) return true;
    for (u32 peer = 0; (waiting_ != 0 || dead_ != 0) && peer < links_.size(); ++peer) {
        if (may_post(peer, links_[peer])) return true;
    }
    return false;
}

bool Sender::is_open_to(const std::function<bool(u32)>& counts) const {
    for (u32 peer = 0; peer < links_.size(); ++peer) {
        const bool open = !links_[peer].queue.empty() || links_[peer].bytes_on_their_way != 0;
        if (open && counts(peer)) return true;
    }
    return false;
}

void Sender::completed(const Completion& completion) {
    const OnItsWay ended = on_their_way_[completion.context];
    free_places_.push_back(static_cast<u32>(completion.context));
    Link& link = links_[ended.peer];
    link.bytes_on_their_way -= ended.bytes;
    if (completion.error == 0) {
        rings_.end_message(ended.of);
        link.windows[ended.word].end(ended.number);
        return;
    }
    link.lost.push_back(ended.of);
    if (!link.dead) ++dead_;
    if (!link.dead && !closed_(ended.peer)) faults_.push_back({ended.peer, completion.error});
    link.dead = true;
    lose(link);
}

std::vector<Sender::Fault> Sender::faults() { return std::exchange(faults_, {}); }

}  // namespace deep_ep::host::proxy
