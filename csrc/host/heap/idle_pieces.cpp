#include "host/heap/idle_pieces.h"

#include <algorithm>

namespace deep_ep::host {

void IdlePieces::take(uint64_t offset, uint64_t bytes) {
    const size_t last = index_of(offset + bytes - 1);
    if (last >= pieces_.size()) pieces_.resize(last + 1);
    for (size_t index = index_of(offset); index <= last; ++index) {
        Piece& piece = pieces_[index];
        ++piece.blocks;
        if (piece.resident) continue;
        piece.resident = true;
        resident_ += bytes_of(index);
    }
}

void IdlePieces::release(uint64_t offset, uint64_t bytes) {
    const size_t last = index_of(offset + bytes - 1);
    for (size_t index = index_of(offset); index <= last; ++index) {
        --pieces_[index].blocks;
        pieces_[index].released = operation_;
    }
}

void IdlePieces::next_operation(const GiveBack& give_back) {
    ++operation_;
    size_t looks = std::min(kLooks, pieces_.size()), most = kGivenBack;
    while (looks != 0 && most != 0) {
        // Neighbors go back together: one call of the system costs about as much as a piece.
        const size_t first = next_;
        for (; looks != 0 && most != 0 && next_ != pieces_.size() && is_due(next_); ++next_, --looks, --most) {
        }
        const uint64_t bytes = (next_ - first) * kBytes;
        if (bytes == 0) {
            ++next_;
            --looks;
        } else if (give_back(offset_of(first), bytes)) {
            std::for_each(pieces_.begin() + static_cast<ptrdiff_t>(first),
                          pieces_.begin() + static_cast<ptrdiff_t>(next_),
                          [](Piece& piece) { piece.resident = false; });
            resident_ -= bytes;
            returned_ += bytes;
        }
        if (next_ >= pieces_.size()) next_ = 0;
    }
}

uint64_t IdlePieces::bytes_of(size_t index) const {
    return std::min(offset_of(index + 1), end_) - std::max(offset_of(index), begin_);
}

bool IdlePieces::is_due(size_t index) const {
    const Piece& piece = pieces_[index];
    return piece.resident && piece.blocks == 0 && operation_ - piece.released > kOperations &&
           bytes_of(index) == kBytes;
}

}  // namespace deep_ep::host
