// The latest accesses to each byte of memory, and the words that strong accesses have stored to.
#pragma once

#include <unordered_map>
#include <vector>

#include "sim/ptx/order/word.h"

namespace deep_ep::ptx {

class Shadow {
  public:
    // Notes an access by an actor with this clock. Returns an earlier access that it races with, that is, one that
    // conflicts with it, did not happen before it, and is not morally strong with it. Null: there is none.
    const Made* note(bool writes, const Made& access, const Clock& clock);

    // See Word. The access must have been noted before.
    u64 load(u64 newest, bool acquires, const Made& access, const Clock& knows, Clock& clock, cpu::Random* random);
    void store(const Word::Stored& stored, const Made& access, const std::vector<Word::Released>& releases);

    void forget(u64 address, u64 bytes);

  private:
    static constexpr u64 kPiece = 16;
    using Mask = u16;  // bytes of a piece

    struct Segment {
        Mask bytes;
        // The accesses that no later one represents (see put).
        std::vector<Made> writes, reads;
    };
    struct Piece {
        std::vector<Segment> segments;
        std::vector<Word> words;
    };

    static void put(Segment& segment, bool writes, const Made& access, const Clock& clock);
    const Made* note_segments(std::vector<Segment>& segments, Mask bytes, bool writes, const Made& access,
                              const Clock& clock);

    std::unordered_map<u64, Piece> pieces_;
    Made found_{};
};

}  // namespace deep_ep::ptx
