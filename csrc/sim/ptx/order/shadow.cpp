#include "sim/ptx/order/shadow.h"

namespace deep_ep::ptx {
namespace {

bool race(const Made& earlier, const Made& access, const Clock& clock) {
    return !clock.covers(earlier.moment) && !morally_strong(earlier, access);
}

bool overlap(const Word& word, u64 begin, u64 end) { return word.address < end && begin < word.address + word.bytes; }

}  // namespace

const Made* Shadow::note(bool writes, const Made& access, const Clock& clock) {
    const Made* found = nullptr;
    const u64 end = access.address + access.bytes;
    for (u64 address = access.address; address < end;) {
        const u64 first = address % kPiece, count = std::min(kPiece - first, end - address);
        const auto mask = static_cast<Mask>(((1u << count) - 1) << first);
        Piece& piece = pieces_[address / kPiece];
        if (writes && access.scope == Scope::kNone && !piece.words.empty()) {
            // A weak write: a later read of one of the word's values would race with it.
            std::erase_if(piece.words, [&](const Word& word) { return overlap(word, access.address, end); });
        }
        const Made* const here = note_segments(piece.segments, mask, writes, access, clock);
        if (found == nullptr) found = here;
        address += count;
    }
    return found;
}

// Drops earlier accesses that the new one represents. Whatever is ordered after the new access is also ordered after
// everything that happened before it, so it represents those accesses if every later conflicting access must be ordered
// after it (it is weak), or if they are strong in the same way (an access that is morally strong with it is so with
// them).
void Shadow::put(Segment& segment, bool writes, const Made& access, const Clock& clock) {
    const auto is_stood_for = [&](const Made& made) {
        const bool alike = made.scope == access.scope && made.address == access.address && made.bytes == access.bytes &&
                           made.rank == access.rank && made.block == access.block && !made.module == !access.module;
        return clock.covers(made.moment) && (alike || access.scope == Scope::kNone);
    };
    if (writes) std::erase_if(segment.writes, is_stood_for);
    std::erase_if(segment.reads, is_stood_for);
    (writes ? segment.writes : segment.reads).push_back(access);
}

const Made* Shadow::note_segments(std::vector<Segment>& piece, Mask bytes, bool writes, const Made& access,
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
        for (const Made& write : segment.writes) look(write);
        if (writes) {
            for (const Made& read : segment.reads) look(read);
        }
        put(segment, writes, access, clock);
    }
    if (left != 0) {
        Segment made{left, {}, {}};
        put(made, writes, access, clock);
        piece.push_back(std::move(made));
    }
    return found;
}

u64 Shadow::load(u64 newest, bool acquires, const Made& access, const Clock& knows, Clock& clock, cpu::Random* random) {
    const auto piece = pieces_.find(access.address / kPiece);
    if (piece == pieces_.end()) return newest;
    for (Word& word : piece->second.words) {
        if (word.address != access.address || word.bytes != access.bytes) continue;
        return word.load(newest, acquires, access, knows, clock, random);
    }
    return newest;
}

void Shadow::store(const Word::Stored& stored, const Made& access, const std::vector<Word::Released>& releases) {
    std::vector<Word>& words = pieces_[access.address / kPiece].words;
    const auto is_same = [&](const Word& word) { return word.address == access.address && word.bytes == access.bytes; };
    // Words of another size are ordered before this store: otherwise it would have raced.
    std::erase_if(words, [&](const Word& word) {
        return !is_same(word) && overlap(word, access.address, access.address + access.bytes);
    });
    const auto found = std::find_if(words.begin(), words.end(), is_same);
    Word& word = found != words.end() ? *found : words.emplace_back(access.address, access.bytes);
    word.store(stored, access, releases);
}

void Shadow::forget(u64 address, u64 bytes) {
    const u64 end = address + bytes;
    std::erase_if(pieces_, [&](const auto& piece) {
        const u64 begin = piece.first * kPiece;
        return begin >= address && begin < end;
    });
}

}  // namespace deep_ep::ptx
