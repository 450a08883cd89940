// Data that kernels read from memory may be wrong: a plan that was overwritten between a dispatch and its later use, or
// an output at an address that a peer has not mapped. The operation fails, and nothing is written anywhere else (P15).
#pragma once

#include <map>

#include "ranks.h"

namespace protocol::bounds {

// The rank whose plan is tampered with, and the peer that the tampering concerns. The peer has the first rows
// everywhere.
constexpr u32 kTampered = 2, kPeer = 0;
constexpr u64 kCanary = 4096;

enum class Operation { kDispatch, kCombine };

// The rank that must detect it: the tampered rank itself, before it stores anything; the same, unless a peer first
// misses rows in another chunk, which some schedules cause; any rank, through data that arrives or does not; or none,
// because the value is not used there and all results are right.
enum class Found { kByItself, kByItselfOrPeer, kByAnyRank, kNot };
constexpr u32 kTries = 6;  // schedules, at least one of which must differ

struct Tampering {
    std::function<void(Batch&)> with;
    // In a cached dispatch and in combine: where rows go directly to their destinations, and where they go in chunks.
    Found dispatch, dispatch_chunks, combine, combine_chunks;
};

inline i32& prefix(Batch& batch, u32 from, u32 to) { return batch.prefix[from * kRanks + to]; }
inline i32& row_for_peer(Batch& batch) {
    for (u32 t = 0;; ++t) {
        if (i32& row = batch.token_row[t * kRanks + kPeer]; row >= 0) return row;
    }
}

inline const std::map<std::string, Tampering>& tamperings() {
    using enum Found;
    static const std::map<std::string, Tampering> all = {
        {"prefix is negative",
         {[](Batch& b) { prefix(b, kTampered, kPeer) = -1; }, kByItself, kByItself, kByItself, kByItself}},
        {"prefix is too large",
         {[](Batch& b) { prefix(b, kTampered, kPeer) = 0x7fffffff; }, kByItself, kByItself, kByItself, kByItself}},
        {"prefix decreases",
         {[](Batch& b) { prefix(b, kTampered, kPeer) = prefix(b, kTampered - 1, kPeer) - 1; }, kByItself, kByItself,
          kByItself, kByItself}},
        {"one row fewer is sent",
         {[](Batch& b) { --prefix(b, kTampered, kPeer); }, kByItself, kByAnyRank, kByItself, kByItself}},
        // Chunks state their beginning only among the rows of their source.
        {"rows begin behind the output",
         {[](Batch& b) {
              prefix(b, kTampered - 1, kPeer) += 9;
              prefix(b, kTampered, kPeer) += 9;
          },
          kByItself, kNot, kByItself, kNot}},
        // The rank between the two has no tokens.
        {"a row of the next source's",
         {[](Batch& b) { --prefix(b, kPeer, kTampered); }, kNot, kByItself, kNot, kByAnyRank}},
        {"more rows come than there are",
         {[](Batch& b) { prefix(b, kTampered, kTampered) += 1; }, kByItself, kByItself, kByItself, kByItself}},
        {"row of a token", {[](Batch& b) { row_for_peer(b) = 1 << 20; }, kByItself, kNot, kByItself, kByItself}},
        {"token of a row", {[](Batch& b) { b.row_token[kPeer * b.tokens] = 1 << 20; }, kNot, kByItself, kNot, kNot}},
        {"negative token of a row",
         {[](Batch& b) { b.row_token[kPeer * b.tokens] = -1; }, kNot, kByItself, kNot, kNot}},
        {"all rows of one token",
         {[](Batch& b) { std::fill_n(b.recv_src.as<i32>(), prefix(b, kPeer, kTampered), 0); }, kNot, kNot, kNot,
          kByItselfOrPeer}},
        {"tokens of a source",
         {[](Batch& b) { b.source_tokens[kPeer] = 0x7fffffff; }, kNot, kNot, kByItself, kByItself}},
        {"negative tokens of a source",
         {[](Batch& b) { b.source_tokens[kPeer] = -5; }, kNot, kNot, kByItself, kByItself}},
        {"fewer tokens of its own",
         {[](Batch& b) { b.source_tokens[kTampered] = 1; }, kNot, kNot, kByItself, kByItself}},
    };
    return all;
}

// A heap that, for other ranks, ends before its owner's outputs.
class ShortHeap final : public host::Heap {
  public:
    ShortHeap(const std::shared_ptr<host::Heap>& whole, size_t mapped)
        : Heap(whole->base(), whole->bytes(), -1, whole), mapped_(mapped) {}
    size_t mapped() const override { return mapped_; }

  private:
    const size_t mapped_;
};

// Memory that kernels of no rank may write: directly after the regions, and between outputs.
class Canary {
  public:
    explicit Canary(host::Runtime& runtime) : memory_(runtime.arena()->address(*runtime.arena()->allocate(kCanary))) {
        std::fill(memory_, memory_ + kCanary, kByte);
    }
    void check(const std::string& whose) const {
        expect(std::count(memory_, memory_ + kCanary, kByte) == kCanary,
               whose + "memory that is no rank's was written");
    }

  private:
    static constexpr u8 kByte = 0x5c;
    u8* memory_;
};

// The outcome of a call on each rank.
struct Ends {
    wire::Failure of[kRanks];

    bool found(u32 rank) const {
        return wire::mark_reason(of[rank].mark) == wire::kMismatch &&
               of[rank].phase == static_cast<u32>(wire::Phase::kBounds);
    }
    // Returns whether the expected rank detected it.
    bool check(const std::string& name, Found expected) const {
        u32 failed = 0;
        for (u32 r = 0; r < kRanks; ++r) {
            failed += of[r].mark != 0;
            const u32 reason = wire::mark_reason(of[r].mark);
            const bool late = expected == Found::kByAnyRank && reason == wire::kTimeout;
            expect(of[r].mark == 0 || found(r) || late || reason == wire::kAborted,
                   name + ": rank " + std::to_string(r) + " failed for reason " + std::to_string(reason));
        }
        expect((failed != 0) == (expected != Found::kNot), name + ": " + std::to_string(failed) + " ranks failed");
        expect(found(kTampered) || expected != Found::kByItself, name + ": the rank did not detect it");
        return found(kTampered) || expected != Found::kByItselfOrPeer;
    }
};

// Returns the result of Ends::check().
inline bool run_tampered(uint64_t seed, const Setup& setup, const std::string& name, Operation operation) {
    const bool direct = setup.fabric == "peer" && setup.arena;
    const Tampering& tampering = tamperings().at(name);
    World world;
    Ends ends{};
    planted::run_world(kRanks, seed, [&](int r) {
        const u32 rank = static_cast<u32>(r);
        Buffer buffer(world, rank, setup);
        std::optional<Canary> canary;
        if (setup.arena) canary.emplace(buffer.runtime());
        Batch batch(buffer, 0);
        auto call = batch.notify();
        batch.dispatch(*call);
        end_well(buffer, call);
        batch.check_dispatch();
        buffer.meet(world);

        if (rank == kTampered) tampering.with(batch);
        Output rows(buffer.runtime(), setup.arena, u64{batch.count} * kRowBytes), sums = batch.make_sums();
        call =
            operation == Operation::kDispatch ? batch.cached_dispatch(rows) : batch.combine(buffer, batch.recv_x, sums);
        buffer.runtime().wait(*call);
        buffer.meet(world);
        ends.of[rank] = call->failure();
        if (call->reason() == 0 && operation == Operation::kDispatch) batch.check_rows(rows);
        if (call->reason() == 0 && operation == Operation::kCombine) batch.check_echo(sums);
        rows.check(batch.whose());
        sums.check(batch.whose());
        batch.check_guards();
        if (canary) canary->check(batch.whose());
        buffer.meet(world);
    });
    const Found in_dispatch = direct ? tampering.dispatch : tampering.dispatch_chunks;
    const Found in_combine = direct ? tampering.combine : tampering.combine_chunks;
    return ends.check(name + (operation == Operation::kDispatch ? ", cached dispatch" : ", combine"),
                      operation == Operation::kDispatch ? in_dispatch : in_combine);
}

// The other ranks have mapped that rank's heap only up to its arena, which holds its outputs.
inline void run_short(uint64_t seed, const Setup& setup) {
    World world;
    Ends ends{};
    planted::run_world(kRanks, seed, [&](int r) {
        const u32 rank = static_cast<u32>(r);
        Parts parts;
        parts.mapped = [&](u32 peer, std::shared_ptr<host::Heap> heap) -> std::shared_ptr<host::Heap> {
            if (peer != kTampered || rank == kTampered) return heap;
            return std::make_shared<ShortHeap>(heap, heap->bytes() - (1 << 16) + kCanary);
        };
        Buffer buffer(world, rank, setup, std::move(parts));
        const Canary canary(buffer.runtime());
        Batch batch(buffer, 0);
        auto call = batch.notify();
        const bool counted = batch.dispatch(*call);
        buffer.runtime().wait(*call);
        buffer.meet(world);
        ends.of[rank] = call->failure();
        if (call->reason() == 0) batch.check_dispatch();
        if (counted) batch.check_guards();
        canary.check(batch.whose());
        buffer.meet(world);
    });
    ends.check("a heap that ends early", Found::kByAnyRank);
    expect(!ends.found(kTampered), "its own rank has all of it");
}

// One rank sends ids of which its layout is not: it fails before any rank has its counts.
inline void run_other_ids(uint64_t seed, const Setup& setup, const std::function<void(std::vector<i64>&)>& reroute,
                          wire::Phase phase, u64 expected, u64 seen) {
    World world;
    planted::run_world(kRanks, seed, [&](int r) {
        const u32 rank = static_cast<u32>(r);
        Buffer buffer(world, rank, setup);
        Batch batch(buffer, 0);
        const auto call = batch.notify(false, rank == kTampered ? reroute : nullptr);
        buffer.runtime().wait(*call);
        const wire::Failure failure = call->failure();
        const u32 reason = wire::mark_reason(failure.mark);
        if (rank != kTampered) {
            expect(reason == wire::kAborted && failure.cause == wire::kOtherIds && failure.cause_rank == kTampered &&
                       failure.cause_peer == -1,
                   batch.whose() + "is not told of the other ids");
        } else {
            expect(reason == wire::kOtherIds, "other ids are not noticed");
            expect(failure.phase == static_cast<u32>(phase) && failure.peer == -1 && failure.expected == expected &&
                       failure.seen == seen,
                   "other ids: phase " + std::to_string(failure.phase) + ", peer " + std::to_string(failure.peer) +
                       ", expected " + std::to_string(failure.expected) + ", seen " + std::to_string(failure.seen));
        }
        buffer.meet(world);
    });
}

inline void run(uint64_t seed, const Setup& setup) {
    for (const auto& [name, tampering] : tamperings()) {
        for (const Operation operation : {Operation::kDispatch, Operation::kCombine}) {
            u32 tries = 0;
            while (!run_tampered(seed + tries, setup, name, operation)) {
                expect(++tries < kTries, name + ": the rank never detects it");
            }
        }
    }
    if (setup.fabric == "peer" && setup.arena) run_short(seed, setup);
    // Experts 2 and 0 of token 0, and 0 and 4 of token 2: a choice less, and a choice of a rank that gets no row for
    // it, with the same counts for each expert and rank.
    u64 counted = 0;
    for (u32 i = 0; i < kTokens[kTampered] * kTopk; ++i) counted += expert(0, kTampered, i / kTopk, i % kTopk) == 2;
    run_other_ids(
        seed, setup, [](std::vector<i64>& ids) { ids[0] = -1; }, wire::Phase::kNotify, 2,
        counted << 32 | (counted - 1));
    run_other_ids(
        seed, setup, [](std::vector<i64>& ids) { std::swap(ids[1], ids[2 * kTopk + 1]); }, wire::Phase::kData, 0,
        2ull << 32 | 4);
}

}  // namespace protocol::bounds
