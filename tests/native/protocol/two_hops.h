// Dispatch and combine in two hops through a Runtime, on ranks that are threads, several per node: chunks of two rows,
// and enough of them that each slot is used several times. Every value is checked.
#pragma once

#include "two_hop_tokens.h"

namespace protocol::two_hop_mode {

constexpr u32 kLaps = 3;

// The ranks whose outputs others can store into, or whose rows they can read.
struct Seen {
    enum Kind : u32 { kAll, kNone, kSome, kKinds } kind;
    u64 random;

    // For the `number`-th operation of a lap: each lap has all kinds.
    static Seen of(uint64_t seed, u32 lap, u32 number) {
        return {static_cast<Kind>((lap + number) % kKinds), mixed(kSeen, seed, lap, number)};
    }
    bool has(u32 rank) const { return kind == kSome ? (random >> rank & 1) != 0 : kind == kAll; }
};

// Everything that an operation waits for has arrived when the operation has ended, so no word is behind the consumed
// count (P4, P7). `exactly`: when all ranks have finished, nothing else has arrived either.
inline void check_words(Buffer& buffer, const Context& context, bool exactly) {
    const wire::HeapLayout heap = host::Runtime::heap_layout(buffer.runtime().options());
    for (u32 i = 0; i < heap.words(); ++i) {
        const u32 kind = i / heap.ranks % wire::kSignals;
        if (kind == wire::kFree) continue;
        const u64* const place = buffer.word(i / heap.ranks / wire::kSignals, kind, i % heap.ranks);
        const u64 word = __atomic_load_n(place, __ATOMIC_ACQUIRE);
        expect(exactly ? word == context.base[i] : word >= context.base[i],
               "rank " + std::to_string(buffer.rank) + ": word of kind " + std::to_string(kind) + " of " +
                   std::to_string(i % heap.ranks));
    }
}

// A lap of one rank: a dispatch, the same rows again, and two combines, queued one after the other.
class Trip : public Dispatched {
  public:
    Trip(Buffer& buffer, uint64_t seed, u32 lap) : Dispatched(buffer, lap), seed_(seed) {}
    ~Trip() { settle(); }

    // Returns the state that the kernels of this rank share.
    const Context& run() {
        expect(host::two_hops::chunk_rows(runtime(), sizes_) >= kChunkRows, "a dispatch has smaller chunks");
        const auto dispatched = notify();
        dispatch(*dispatched, seen(0), routing_.lap % 2 * 3);
        again_x_ = Output(runtime(), seen(1), u64{count()} * kRowBytes);
        again_scales_ = Output(runtime(), seen(1), u64{count()} * routing_.scales() * sizeof(u32));
        const auto again = dispatch_again(again_x_, again_scales_);
        const std::shared_ptr<host::Call> combined[] = {combine_turn(0), combine_turn(1)};
        const Context& context = *runtime().call_args(*combined[0]).context;
        end_well(buffer_, dispatched);
        check_dispatch();
        end_well(buffer_, again);
        check_rows(again_x_, "again");
        check_scales(again_scales_, "again");
        for (u32 turn = 0; turn < kCombines; ++turn) {
            end_well(buffer_, combined[turn]);
            if (turn + 1 == kCombines) check_words(buffer_, context, false);
            check_sums(turn);
        }
        for (Output* output : {&again_x_, &again_scales_}) end(*output);
        for (Combined& one : combined_) {
            for (Output* output : {&one.x, &one.weights, &one.sums, &one.weight_sums}) end(*output);
        }
        release();
        return context;
    }

  private:
    static constexpr u32 kCombines = 2;
    struct Combined {
        Output x, weights, sums, weight_sums;
        std::vector<u16> bias[2];
    };

    void end(Output& output) const {
        output.check(whose());
        output.release();
    }
    bool seen(u32 number) const { return Seen::of(seed_, routing_.lap, number).has(rank_); }
    // The first with weights; the lap determines the number of biases.
    u32 biases(u32 turn) const { return (routing_.lap + turn) % 3; }
    std::shared_ptr<host::Call> combine_turn(u32 turn) {
        const u32 topk = turn == 0 ? kTopk : 0;
        Combined& one = combined_[turn];
        one.x = Output(runtime(), seen(2 + turn), u64{count()} * kRowBytes);
        one.sums = Output(runtime(), false, u64{tokens_} * kRowBytes);
        for (u32 row = 0; row < count(); ++row) {
            const auto [source, token, node_row] = rows()[row];
            for (u32 h = 0; h < kHidden; ++h) {
                one.x.as<u16>()[row * kHidden + h] = rounded(routing_.result(turn, rank_, source, token, h));
            }
        }
        one.weights = Output(runtime(), seen(2 + turn), count() * topk * sizeof(float));
        one.weight_sums = Output(runtime(), false, tokens_ * topk * sizeof(float));
        for (u32 i = 0; i < count() * topk; ++i) {
            const auto [source, token, node_row] = rows()[i / kTopk];
            one.weights.as<float>()[i] = routing_.result_weight(turn, rank_, source, token, i % kTopk);
        }
        host::normal::CombineTensors with;
        with.x = one.x.address();
        with.topk_weights = one.weights.address();
        with.combined_x = one.sums.address();
        with.combined_weights = one.weight_sums.address();
        for (u32 number = 0; number < biases(turn); ++number) {
            std::vector<u16>& bias = one.bias[number];
            bias.resize(tokens_ * kHidden);
            for (u32 i = 0; i < bias.size(); ++i) {
                bias[i] = rounded(Routing::bias(number, rank_, i / kHidden, i % kHidden));
            }
            with.bias[number] = address(bias);
        }
        return combine(with, topk);
    }
    void check_sums(u32 turn) const {
        const Combined& one = combined_[turn];
        const auto as_chunk = [](float sum) { return widened(rounded(sum)); };
        for (u32 t = 0; t < tokens_; ++t) {
            const std::string what = whose() + "combine " + std::to_string(turn) + ", token " + std::to_string(t);
            for (u32 h = 0; h < kHidden; ++h) {
                const auto of = [&](u32 holder) { return routing_.result(turn, holder, rank_, t, h); };
                float sum = routing_.sum(rank_, t, of, as_chunk);
                for (u32 number = 0; number < biases(turn); ++number) sum += Routing::bias(number, rank_, t, h);
                expect(one.sums.as<u16>()[t * kHidden + h] == rounded(sum), what + ": sum");
            }
            for (u32 k = 0; turn == 0 && k < kTopk; ++k) {
                const auto of = [&](u32 holder) {
                    const bool counts = !routing_.notes_holders() || routing_.local_expert(rank_, t, k, holder) >= 0;
                    return counts ? routing_.result_weight(turn, holder, rank_, t, k) : 0.0f;
                };
                const float sum = routing_.sum(rank_, t, of, [](float sum) { return sum; });
                expect(one.weight_sums.as<float>()[t * kTopk + k] == sum, what + ": sum of weights");
            }
        }
    }

    const uint64_t seed_;
    Output again_x_, again_scales_;
    Combined combined_[kCombines];
};

// Each region has been released by the ranks that its Buffer expects it from, once for each operation in it (P4).
inline void check_free(Buffer& buffer, u32 operations) {
    const Nodes& nodes = buffer.setup.nodes;
    const auto regions = static_cast<u32>(buffer.setup.regions);
    for (u32 region = 0; region < regions; ++region) {
        const u64 uses = (operations + regions - 1 - region) / regions;
        for (u32 r = 0; r < nodes.ranks; ++r) {
            const wire::RankMask lost{{nodes.lost}};
            const bool near =
                !lost.has(r) && wire::Audience{nodes.near_audience ? nodes.per_node : 0}.joins(buffer.rank, r, lost);
            const u64 expected = near ? uses * wire::kUnit : 0;
            const auto given_back = [&] {
                return __atomic_load_n(buffer.word(region, wire::kFree, r), __ATOMIC_ACQUIRE) == expected;
            };
            // A proxy retires a put once it has arrived; the receiver's host may store its total later. A total that
            // never comes is a deadlock, which the executor reports.
            const std::string what = "what rank " + std::to_string(r) + " has given back";
            if (buffer.setup.fabric == "proxy") cpu::Executor::get().wait(given_back, what.c_str());
            expect(given_back(), "rank " + std::to_string(buffer.rank) + ": " + what);
        }
    }
}

inline void run(uint64_t seed, const Setup& setup) {
    World world(setup.nodes.ranks);
    planted::run_world(static_cast<int>(setup.nodes.ranks), seed, [&](int r) {
        Buffer buffer(world, static_cast<u32>(r), setup);
        const Context* context = nullptr;
        const wire::RankMask lost{{setup.nodes.lost}};
        if (lost.has(buffer.rank)) {
            buffer.runtime().leave();
            for (u32 meeting = 0; meeting < 2; ++meeting) buffer.meet(world);
            return;
        }
        if (setup.nodes.lost != 0) buffer.recover(lost);
        for (u32 lap = 0; lap < kLaps; ++lap) context = &Trip(buffer, seed, lap).run();
        buffer.meet(world);
        buffer.runtime().drain();
        buffer.meet(world);
        check_words(buffer, *context, true);
        check_free(buffer, 4 * kLaps);
    });
}

}  // namespace protocol::two_hop_mode
