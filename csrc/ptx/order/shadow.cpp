#include "ptx/order/shadow.h"

namespace deep_ep::ptx {
namespace {

bool race(const Made& earlier, const Made& access, const Clock& clock) {
    return !clock.covers(earlier.moment) && !inclusive(earlier, access);
}

}  // namespace

const Made* Shadow::note(u64 address, u64 bytes, bool writes, const Made& access, const Clock& clock) {
    const Made* found = nullptr;
    for (const u64 end = address + bytes; address < end;) {
        const u64 piece = address / kPiece, first = address % kPiece;
        const u64 count = std::min(kPiece - first, end - address);
        const auto mask = static_cast<Mask>(((1u << count) - 1) << first);
        const Made* const here = note_piece(pieces_[piece], mask, writes, access, clock);
        if (found == nullptr) found = here;
        address += count;
    }
    return found;
}

const Made* Shadow::note_piece(std::vector<Segment>& piece, Mask bytes, bool writes, const Made& access,
                               const Clock& clock) {
    const Made* found = nullptr;
    const auto look = [&](const Made& earlier) {
        if (found != nullptr || !race(earlier, access, clock)) return;
        found_ = earlier;
        found = &found_;
    };
    Mask left = bytes;
    const size_t count = piece.size();
    for (size_t i = 0; i < count; ++i) {
        const Mask both = piece[i].bytes & bytes;
        if (both == 0) continue;
        left = static_cast<Mask>(left & ~both);
        if (both != piece[i].bytes) {  // the rest keeps what it has
            Segment rest = piece[i];
            rest.bytes = static_cast<Mask>(rest.bytes & ~both);
            piece.push_back(std::move(rest));
        }
        Segment& segment = piece[i];
        segment.bytes = both;
        if (segment.is_written) look(segment.write);
        if (writes) {
            for (const Made& read : segment.reads) look(read);
            segment.is_written = true;
            segment.write = access;
            segment.reads.clear();
            continue;
        }
        // Of an actor the latest read says it all; so does this one for all that came before it.
        std::erase_if(segment.reads,
                      [&](const Made& read) { return clock.covers(read.moment) && read.scope == access.scope; });
        segment.reads.push_back(access);
    }
    if (left != 0) {
        Segment made{left, writes, access, {}};
        if (!writes) made.reads.push_back(access);
        piece.push_back(std::move(made));
    }
    return found;
}

void Shadow::acquire(u64 address, u64 value, const Made& access, Clock& clock) {
    const auto found = words_.find(address);
    // Where another value was left there, a host or a NIC has written this one.
    if (found == words_.end() || found->second.value != value) return;
    for (const Released& released : found->second.releases) {
        if (inclusive(released.by, access)) clock.join(released.clock);
    }
}

void Shadow::store(u64 address, const Stored& stored, const Made& access, const Clock& clock) {
    Word& word = words_[address];
    if (!stored.updates || word.value != stored.before) word.releases.clear();
    word.value = stored.after;
    if (stored.releases) word.releases.push_back({clock, access});
}

void Shadow::forget(u64 address, u64 bytes) {
    const auto within = [&](u64 place) { return place >= address && place < address + bytes; };
    std::erase_if(pieces_, [&](const auto& piece) { return within(piece.first * kPiece); });
    std::erase_if(words_, [&](const auto& word) { return within(word.first); });
}

}  // namespace deep_ep::ptx
