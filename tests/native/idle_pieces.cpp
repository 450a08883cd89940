// host/heap/idle_pieces.h: which memory is given back, and when. Prints what is wrong, if anything.
#include "host/heap/idle_pieces.h"

#include <cstdio>
#include <utility>
#include <vector>

namespace {

using deep_ep::host::IdlePieces;

constexpr uint64_t kPiece = IdlePieces::kBytes, kMany = 300;
bool failed = false;

void expect(bool holds, const char* what) {
    if (holds) return;
    failed = true;
    std::puts(what);
}

// Pieces that lie wholly in the arena: numbers 1 to kMany.
struct Arena {
    IdlePieces pieces{kPiece / 2, (kMany + 1) * kPiece + kPiece / 2};
    std::vector<std::pair<uint64_t, uint64_t>> given_back;
    bool refuses = false;

    void operations(uint64_t count) {
        for (uint64_t i = 0; i < count; ++i) {
            pieces.next_operation([this](uint64_t offset, uint64_t bytes) {
                given_back.emplace_back(offset, bytes);
                return !refuses;
            });
        }
    }
};

void only_after_many_operations() {
    Arena arena;
    arena.pieces.take(kPiece, 3 * kPiece);
    arena.operations(2 * IdlePieces::kOperations);
    expect(arena.given_back.empty(), "memory in use was given back");
    arena.pieces.release(kPiece, 3 * kPiece);
    arena.operations(IdlePieces::kOperations);
    expect(arena.given_back.empty() && arena.pieces.resident() == 3 * kPiece, "memory was given back early");
    arena.operations(1);
    expect(arena.given_back == std::vector{std::pair{kPiece, 3 * kPiece}}, "neighbors were not given back together");
    expect(arena.pieces.resident() == 0 && arena.pieces.returned() == 3 * kPiece, "the counts are wrong");
    arena.operations(2 * IdlePieces::kOperations);
    expect(arena.given_back.size() == 1, "memory was given back twice");
}

void use_makes_it_young() {
    Arena arena;
    for (int i = 0; i < 5; ++i) {
        arena.pieces.take(kPiece, 2 * kPiece);
        arena.pieces.release(kPiece, 2 * kPiece);
        arena.operations(IdlePieces::kOperations);
    }
    expect(arena.given_back.empty(), "memory that is reused was given back");
}

void shared_and_partial_pieces_stay() {
    Arena arena;
    arena.pieces.take(kPiece / 2, kPiece);      // half of piece 0, which is partly outside, and half of piece 1
    arena.pieces.take(kPiece * 3 / 2, kPiece);  // the other half of piece 1, and half of piece 2
    arena.pieces.take((kMany + 1) * kPiece, kPiece / 2);
    expect(arena.pieces.resident() == 3 * kPiece, "pieces at the ends count more than is in the arena");
    arena.pieces.release(kPiece / 2, kPiece);
    arena.pieces.release((kMany + 1) * kPiece, kPiece / 2);
    arena.operations(2 * IdlePieces::kOperations);
    expect(arena.given_back.empty(), "a piece that is half in use, or partly outside the arena, was given back");
    arena.pieces.release(kPiece * 3 / 2, kPiece);
    arena.operations(2 * IdlePieces::kOperations);
    expect(arena.given_back == std::vector{std::pair{kPiece, 2 * kPiece}}, "pieces 1 and 2 were not given back");
}

void little_at_a_time() {
    Arena arena;
    arena.pieces.take(kPiece, kMany * kPiece);
    arena.pieces.release(kPiece, kMany * kPiece);
    arena.operations(IdlePieces::kOperations);
    uint64_t before = 0, operations = 0;
    for (; arena.pieces.returned() < kMany * kPiece && operations < kMany; ++operations) {
        arena.operations(1);
        expect(arena.pieces.returned() - before <= IdlePieces::kGivenBack * kPiece, "too much in one operation");
        before = arena.pieces.returned();
    }
    expect(operations <= kMany / IdlePieces::kGivenBack + 2, "it takes too many operations");
}

void a_refusal_is_not_counted() {
    Arena arena;
    arena.refuses = true;
    arena.pieces.take(kPiece, kPiece);
    arena.pieces.release(kPiece, kPiece);
    arena.operations(IdlePieces::kOperations + 1);
    expect(arena.given_back.size() == 1, "it was not tried");
    expect(arena.pieces.resident() == kPiece && arena.pieces.returned() == 0, "a refusal was counted");
}

}  // namespace

int main() {
    only_after_many_operations();
    use_makes_it_young();
    shared_and_partial_pieces_stay();
    little_at_a_time();
    a_refusal_is_not_counted();
    return failed ? 1 : 0;
}
