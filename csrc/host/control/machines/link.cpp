#include "host/control/machines/link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace deep_ep::host {

using namespace wire::control;

Link::Link(int socket, const TagKey& own, const TagKey& theirs)
    : socket_(fcntl(socket, F_DUPFD_CLOEXEC, 0)), own_(own), theirs_(theirs) {
    if (socket_ < 0) throw std::system_error(errno, std::generic_category(), "a connection to another machine");
    fcntl(socket_, F_SETFL, fcntl(socket_, F_GETFL) | O_NONBLOCK);
    const int on = 1, off = 0;
    setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    // Removes the bound that the bootstrap has set: a rank that is stopped may accept nothing for long although it
    // lives.
    setsockopt(socket_, IPPROTO_TCP, TCP_USER_TIMEOUT, &off, sizeof(off));
}

u64 Link::unacknowledged_ns() const {
    tcp_info info{};
    socklen_t bytes = sizeof(info);
    if (getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return 0;
    return u64{info.tcpi_last_ack_recv} * 1'000'000;
}

void Link::close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
}

void Link::add(Kind kind, const void* payload, size_t bytes) {
    const Frame frame{static_cast<u32>(bytes), kind, added_++};
    const Tag tag = tag_of(own_, frame, payload);
    unsent_.append(reinterpret_cast<const char*>(&frame), sizeof(frame));
    unsent_.append(static_cast<const char*>(payload), bytes);
    unsent_.append(reinterpret_cast<const char*>(&tag), sizeof(tag));
}

void Link::send() {
    while (has_unsent()) {
        const ssize_t count = ::send(socket_, unsent_.data() + sent_, unsent_.size() - sent_, MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return;
        sent_ += static_cast<size_t>(count);
    }
    unsent_.clear();
    sent_ = 0;
}

bool Link::take(const Take& take) {
    char chunk[1 << 14];
    for (;;) {
        const ssize_t count = recv(socket_, chunk, sizeof(chunk), 0);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
        if (count == 0) return false;
        come_.append(chunk, static_cast<size_t>(count));
        if (!parse(take)) return false;
    }
}

bool Link::parse(const Take& take) {
    size_t at = 0;
    while (come_.size() - at >= sizeof(Frame)) {
        Frame frame;
        std::memcpy(&frame, come_.data() + at, sizeof(frame));
        if (frame.bytes > kMaxPayload || frame.number != taken_) return false;
        const size_t whole = sizeof(frame) + frame.bytes + sizeof(Tag);
        if (come_.size() - at < whole) break;
        const std::string_view payload(come_.data() + at + sizeof(frame), frame.bytes);
        Tag tag;
        std::memcpy(&tag, payload.data() + payload.size(), sizeof(tag));
        if (!(tag == tag_of(theirs_, frame, payload.data()))) return false;
        ++taken_;
        at += whole;
        take(static_cast<Kind>(frame.kind), payload);
    }
    come_.erase(0, at);
    return true;
}

}  // namespace deep_ep::host
