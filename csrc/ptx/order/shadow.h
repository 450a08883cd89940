// The last accesses to each byte of memory, and what a thread learns that reads a word.
#pragma once

#include <unordered_map>
#include <vector>

#include "ptx/order/actor.h"

namespace deep_ep::ptx {

class Shadow {
  public:
    // Notes an access of an actor with this clock. Returns an earlier one that it races with: which conflicts, did not
    // happen before, and is not, as this one, strong with a scope that takes the other in. Null: there is none.
    const Made* note(u64 address, u64 bytes, bool writes, const Made& access, const Clock& clock);

    // A word that has been read with this value by an access that acquires: what that learns goes into its clock.
    void acquire(u64 address, u64 value, const Made& access, Clock& clock);
    // A word that has had the value `before` and now has another, by an access that may release its clock. One that
    // updates leaves what earlier ones have released with the word.
    struct Stored {
        u64 before, after;
        bool releases, updates;
    };
    void store(u64 address, const Stored& stored, const Made& access, const Clock& clock);

    void forget(u64 address, u64 bytes);

  private:
    // A release that a load of the word's value reads from: the store's itself, or that of one before it that only
    // read-modify-writes have followed.
    struct Released {
        Clock clock;
        Made by;
    };
    struct Word {
        u64 value;
        std::vector<Released> releases;
    };
    static constexpr u64 kPiece = 16;
    using Mask = u16;  // bytes of a piece

    struct Segment {
        Mask bytes;
        bool is_written;
        Made write;
        std::vector<Made> reads;  // since then
    };

    const Made* note_piece(std::vector<Segment>& piece, Mask bytes, bool writes, const Made& access,
                           const Clock& clock);

    std::unordered_map<u64, std::vector<Segment>> pieces_;
    std::unordered_map<u64, Word> words_;
    Made found_{};
};

}  // namespace deep_ep::ptx
