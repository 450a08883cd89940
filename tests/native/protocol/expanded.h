// Dispatch into the expanded layout and combine from it, in the order of the choices, and the sum of rows that have
// returned one by one: every value is checked. The values are such that another order of summation gives another sum.
#pragma once

#include "device/bf16.h"
#include "host/modes/expand/calls.h"
#include "kernels/expand/slots.h"
#include "ranks.h"

namespace protocol::expanded {

constexpr u32 kLaps = 3, kChoices = 4, kAlignment = 4, kScales = 3, kHere = kExperts / kRanks;

// Some tokens name several experts of a rank, not beside each other, and some name none.
inline i64 choice(u32 lap, u32 rank, u32 token, u32 k) {
    u32 mixed = (lap * 7 + rank * 5 + token * 11 + k * 97 + 1) * 2654435761u;
    mixed = (mixed ^ mixed >> 15) * 2246822519u;
    const u32 number = (mixed ^ mixed >> 13) % 9;
    if (number >= kExperts) return -1;
    for (u32 before = 0; before < k; ++before) {
        if (choice(lap, rank, token, before) == static_cast<i64>(number)) return -1;  // distinct
    }
    return number;
}
// Large numbers that cancel, and small ones that are lost beside them.
inline u16 summand(u32 seed, u32 h) {
    const float values[] = {33554432.0f, -33554432.0f, 1.0f, 3.0f, 0.5f};
    return float_to_bf16(values[(seed * 2654435761u >> 13 ^ h * 40503u) % 5]);
}
inline u32 weight(u32 rank, u32 token, u32 k) { return rank * 1000 + token * 10 + k + 1; }

class Batch {
  public:
    Batch(Buffer& buffer, u32 lap)
        : lap_(lap),
          rank_(buffer.rank),
          tokens_(kTokens[rank_]),
          buffer_(buffer),
          x_(tokens_ * kHidden),
          bias_(tokens_ * kHidden),
          scales_(tokens_ * kScales),
          idx_(tokens_ * kChoices),
          weights_(tokens_ * kChoices),
          per_rank_(kRanks),
          per_expert_(kExperts),
          in_rank_(tokens_ * kRanks),
          token_row_(tokens_ * kRanks),
          row_token_(tokens_ * kRanks),
          prefix_(kRanks * kRanks),
          source_tokens_(kRanks),
          rows_to_rank_(kRanks),
          rank_sums_(kRanks),
          expert_sums_(kHere),
          expert_rows_(kHere),
          statistics_(kHere, 7),
          ordinals_(tokens_ * kChoices),
          numbers_(buffer.setup.fabric == "peer" && buffer.setup.arena),
          by_senders_(numbers_ && (rank_ + lap) % 2 == 0) {
        for (u32 t = 0; t < tokens_; ++t) {
            for (u32 h = 0; h < kHidden; ++h) {
                x_[t * kHidden + h] = element(lap, rank_, t, h);
                bias_[t * kHidden + h] = summand(t + 50, h);
            }
            for (u32 s = 0; s < kScales; ++s) scales_[t * kScales + s] = scale(rank_, t, s);
            for (u32 k = 0; k < kChoices; ++k) {
                idx_[t * kChoices + k] = choice(lap, rank_, t, k);
                weights_[t * kChoices + k] = static_cast<float>(weight(rank_, t, k));
            }
        }
        for (u32 source = 0; source < kRanks; ++source) {
            for (u32 t = 0; t < kTokens[source]; ++t) {
                bool here = false;
                for (u32 k = 0; k < kChoices; ++k) here = here || local(source, t, k) >= 0;
                if (here) rows_.push_back({source, t});
            }
        }
    }

    std::shared_ptr<host::Call> dispatch() {
        host::Runtime& runtime = buffer_.runtime();
        const host::normal::Sizes sizes{tokens_, kRowBytes, kChoices, kExperts, sizeof(i64), kScales};
        runtime.wait_launch(host::normal::layout(runtime, sizes, address(idx_), address(per_rank_), 0,
                                                 address(per_expert_), address(in_rank_), buffer_.blocks));
        host::normal::CountTensors counts;
        counts.rank_sums = address(rank_sums_);
        counts.expert_sums = address(expert_sums_);
        counts.expert_rows = address(expert_rows_);
        counts.statistics = address(statistics_);
        counts.alignment = kAlignment;
        counts.expanded = true;
        counts.starts = numbers_;
        auto call = host::normal::notify(runtime, sizes, address(in_rank_), address(per_expert_), address(idx_), plan(),
                                         counts, 0, false, buffer_.blocks);
        runtime.wait_counts(*call);
        const auto count = static_cast<u32>(host::normal::total_rows(*call));
        expect(count == rows_.size(), "rows received");
        for (u32 e = 0; e < kHere; ++e) {
            expanded_rows_ += wire::ceil_div(call->words.get()[e], kAlignment) * kAlignment;
        }
        if (!by_senders_) recv_x_ = output(count * kRowBytes);
        recv_scales_ = output(count * kScales * sizeof(u32));
        if (!by_senders_) recv_idx_ = output(count * kChoices * sizeof(i64));
        slots_ = by_senders_ ? output(count * kChoices * sizeof(i32)) : own(count * kChoices * sizeof(i32));
        const u64 expanded_bytes = u64{expanded_rows_} * kRowBytes;
        expanded_x_ = by_senders_ ? output(expanded_bytes) : own(expanded_bytes);
        recv_weights_ = output(count * kChoices * sizeof(float));
        recv_source_ = output(count * sizeof(i32));
        host::normal::DispatchTensors tensors;
        tensors.x = address(x_);
        tensors.scales = address(scales_);
        tensors.scales_stride = {kScales, 1};
        tensors.topk_idx = address(idx_);
        tensors.topk_weights = address(weights_);
        tensors.recv_x = by_senders_ ? expanded_x_.address() : recv_x_.address();
        tensors.recv_scales = recv_scales_.address();
        tensors.recv_topk_idx = by_senders_ ? slots_.address() : recv_idx_.address();
        tensors.recv_topk_weights = recv_weights_.address();
        tensors.recv_src_idx = recv_source_.address();
        if (numbers_) {
            own_counts_ = own(u64{kChoiceChunks} * kExperts * sizeof(u32));
            const host::expand::Layout choices{0, address(ordinals_), kExperts, 1, tokens_, ~0u};
            host::expand::number(runtime, *call, sizes, choices, address(idx_), 0, own_counts_.address(),
                                 buffer_.blocks);
            tensors.ordinals = address(ordinals_);
        }
        if (by_senders_) tensors.expanded_rows = expanded_rows_;
        host::normal::dispatch(runtime, *call, sizes, tensors, plan(), count, false, buffer_.blocks);

        expanded_weights_ = own(expanded_rows_ * sizeof(float));
        stride_ = wire::ceil_div(expanded_rows_, 4) * 4;
        expanded_scales_ = own(u64{stride_} * kScales * sizeof(u32));
        columns_ = own(u64{wire::ceil_div(count, 4)} * 4 * kScales * sizeof(u32));
        chunk_counts_ = own(u64{kChoiceChunks} * kHere * sizeof(u32));
        if (!by_senders_) {
            const u64 received = address(rank_sums_) + sizeof(i32) * (kRanks - 1);
            host::expand::number(runtime, *call, sizes, layout(), recv_idx_.address(), received,
                                 chunk_counts_.address(), buffer_.blocks);
        }
        host::expand::Tensors expanded;
        expanded.x = by_senders_ ? 0 : recv_x_.address();
        expanded.scales = recv_scales_.address();
        expanded.topk_weights = recv_weights_.address();
        expanded.expanded_x = expanded_x_.address();
        expanded.expanded_scales = expanded_scales_.address();
        expanded.expanded_weights = expanded_weights_.address();
        expanded.scales_stride = {1, stride_};
        host::expand::copy(runtime, *call, sizes, layout(), expanded, true, buffer_.blocks);
        host::expand::copy_scales(runtime, *call, sizes, count, recv_scales_.address(), columns_.address(),
                                  wire::ceil_div(count, 4) * 4, buffer_.blocks);
        return call;
    }
    void check_dispatch() {
        i32 from = 0, rows = 0;
        for (u32 source = 0; source < kRanks; ++source) {
            for (const Row& row : rows_) from += row.source == source;
            expect(rank_sums_[source] == from, "running sum of the rows from a rank");
        }
        for (u32 e = 0; e < kHere; ++e) {
            const auto begin = static_cast<u32>(rows);
            u32 at = begin;
            for (u32 row = 0; row < rows_.size(); ++row) {
                for (u32 k = 0; k < kChoices; ++k) {
                    const auto [source, t] = rows_[row];
                    if (local(source, t, k) != static_cast<i32>(e)) continue;
                    expect(slots_.as<i32>()[row * kChoices + k] == static_cast<i32>(at), "slot of a choice");
                    check_row(at++, source, t, k);
                }
            }
            expect(expert_rows_[e] == static_cast<i32>(at - begin), "rows of an expert");
            expect(statistics_[e] == 7 + expert_rows_[e], "statistics");
            expect(expert_sums_[e] == static_cast<i32>(at), "where an expert's rows end");
            rows = static_cast<i32>(wire::ceil_div(at, kAlignment) * kAlignment);
            for (; at < static_cast<u32>(rows); ++at) {
                for (u32 h = 0; h < kHidden; ++h) expect(expanded_x_.as<u16>()[at * kHidden + h] == 0, "padding of x");
                expect(expanded_weights_.as<float>()[at] == 0.0f, "padding of weights");
                for (u32 s = 0; s < kScales; ++s) {
                    expect(expanded_scales_.as<u32>()[at + s * stride_] == 0, "padding of scales");
                }
            }
        }
        for (u32 row = 0; row < rows_.size(); ++row) {
            for (u32 k = 0; k < kChoices; ++k) {
                const bool here = local(rows_[row].source, rows_[row].token, k) >= 0;
                expect(here || slots_.as<i32>()[row * kChoices + k] == -1, "a choice elsewhere has a slot");
            }
            for (u32 s = 0; s < kScales; ++s) {
                const u32 found = columns_.as<u32>()[row + s * (wire::ceil_div(rows_.size(), 4) * 4)];
                expect(found == scale(rows_[row].source, rows_[row].token, s), "column of scales");
            }
        }
        for (const Output* one :
             {&chunk_counts_, &slots_, &expanded_x_, &expanded_weights_, &expanded_scales_, &columns_}) {
            one->check("expanded layout");
        }
    }
    // The experts return values of their own.
    std::shared_ptr<host::Call> combine() {
        for (u32 row = 0; row < rows_.size(); ++row) {
            for (u32 k = 0; k < kChoices; ++k) {
                const i32 slot = slots_.as<i32>()[row * kChoices + k];
                if (slot < 0) continue;
                const auto [source, t] = rows_[row];
                for (u32 h = 0; h < kHidden; ++h) {
                    expanded_x_.as<u16>()[static_cast<u32>(slot) * kHidden + h] = returned(source, t, k, h);
                }
            }
        }
        host::Runtime& runtime = buffer_.runtime();
        const host::normal::Sizes sizes{tokens_, kRowBytes, kChoices, 0};
        folded_x_ = output(rows_.size() * kRowBytes);
        folded_weights_ = output(rows_.size() * kChoices * sizeof(float));
        combined_x_ = own(u64{tokens_} * kRowBytes);
        combined_weights_ = own(tokens_ * kChoices * sizeof(float));
        auto call = host::normal::open(runtime, wire::Kind::kCombine, sizes, lap_);
        host::expand::Tensors expanded;
        expanded.expanded_x = expanded_x_.address();
        expanded.expanded_weights = expanded_weights_.address();
        expanded.x = folded_x_.address();
        expanded.topk_weights = folded_weights_.address();
        host::expand::fold(runtime, *call, sizes, layout(), expanded, buffer_.blocks);
        host::normal::CombineTensors tensors;
        tensors.x = folded_x_.address();
        tensors.topk_weights = folded_weights_.address();
        tensors.src_idx = recv_source_.address();
        tensors.combined_x = combined_x_.address();
        tensors.combined_weights = combined_weights_.address();
        tensors.bias = {tokens_ == 0 ? 0 : address(bias_), 0};
        tensors.topk_idx = address(idx_);
        tensors.choices = kChoices;
        tensors.experts = kExperts;
        host::normal::combine(runtime, *call, sizes, tensors, plan(), static_cast<u32>(rows_.size()), true,
                              buffer_.blocks);
        sum_choices(*call);
        return call;
    }
    void check_combine() {
        for (u32 t = 0; t < tokens_; ++t) {
            for (u32 h = 0; h < kHidden; ++h) {
                float each = bf16_to_float(bias_[t * kHidden + h]) + bf16_to_float(x_[t * kHidden + h]);
                for (u32 k = 0; k < kChoices; ++k) each += bf16_to_float(returned(rank_, t, k, h));
                expect(summed_.as<u16>()[t * kHidden + h] == float_to_bf16(each), "sum of a token's choices");
                float total = bf16_to_float(bias_[t * kHidden + h]);
                for (u32 k = 0; k < kChoices; ++k) {
                    if (is_last(t, k)) total += bf16_to_float(folded(t, holder(t, k), h));
                }
                expect(combined_x_.as<u16>()[t * kHidden + h] == float_to_bf16(total), "sum of a token");
            }
            for (u32 k = 0; k < kChoices; ++k) {
                const float wanted = choice(lap_, rank_, t, k) < 0 ? 0.0f : static_cast<float>(weight(rank_, t, k));
                expect(combined_weights_.as<float>()[t * kChoices + k] == wanted, "weight of a choice");
            }
        }
        summed_.check("sums of choices");
        combined_x_.check("sums");
        combined_weights_.check("weights");
    }
    void end() {
        for (Output* one : {&recv_scales_, &recv_weights_, &recv_source_, &folded_x_, &folded_weights_}) {
            one->check("rows");
            one->release();
        }
        for (Output* one : by_senders_ ? std::array{&slots_, &expanded_x_} : std::array{&recv_x_, &recv_idx_}) {
            one->check("rows and choices");
            one->release();
        }
    }

  private:
    // At the end of a combine, on the owner: the sums of biases and of rows that have returned one by one.
    void sum_choices(host::Call& call) {
        const u32 choices = tokens_ * kChoices;
        every_choice_.resize(choices);
        returned_x_ = own(u64{choices} * kRowBytes);
        summed_ = own(u64{tokens_} * kRowBytes);
        for (u32 i = 0; i < choices; ++i) {
            every_choice_[i] = static_cast<i32>(i);
            for (u32 h = 0; h < kHidden; ++h) {
                returned_x_.as<u16>()[i * kHidden + h] = returned(rank_, i / kChoices, i % kChoices, h);
            }
        }
        host::expand::Tensors tensors;
        tensors.expanded_x = returned_x_.address();
        tensors.x = summed_.address();
        if (tokens_ != 0) tensors.bias = {address(bias_), address(x_)};
        host::expand::fold(buffer_.runtime(), call, {tokens_, kRowBytes, kChoices, 0},
                           {0, address(every_choice_), 0, 1, tokens_, choices}, tensors, buffer_.blocks);
    }
    struct Row {
        u32 source, token;
    };
    template <class T>
    static u64 address(std::vector<T>& vector) {
        return reinterpret_cast<u64>(vector.data());
    }
    static u32 scale(u32 rank, u32 token, u32 s) { return rank << 16 | token << 4 | s; }
    Output output(u64 bytes) { return {buffer_.runtime(), buffer_.setup.arena, bytes}; }
    Output own(u64 bytes) { return {buffer_.runtime(), false, bytes}; }
    Plan plan() {
        return {token_row_.data(), row_token_.data(), prefix_.data(), source_tokens_.data(), rows_to_rank_.data()};
    }
    host::expand::Layout layout() {
        return {address(expert_rows_),          slots_.address(), kHere, kAlignment,
                static_cast<u32>(rows_.size()), expanded_rows_};
    }
    // The local expert of a choice, or -1.
    i32 local(u32 source, u32 token, u32 k) const {
        const i64 expert = choice(lap_, source, token, k) - static_cast<i64>(rank_ * kHere);
        return expert >= 0 && expert < kHere ? static_cast<i32>(expert) : -1;
    }
    u16 returned(u32 source, u32 token, u32 k, u32 h) const { return summand(source * 97 + token * 13 + k, h); }
    // The rank that holds a choice of one of this rank's tokens; kRanks: none.
    u32 holder(u32 token, u32 k) const {
        const i64 expert = choice(lap_, rank_, token, k);
        return expert < 0 ? kRanks : static_cast<u32>(expert) / kHere;
    }
    bool is_last(u32 token, u32 k) const {
        for (u32 later = k + 1; later < kChoices; ++later) {
            if (holder(token, later) == holder(token, k)) return false;
        }
        return holder(token, k) != kRanks;
    }
    // The element that a holder returns for one of this rank's tokens: the sum over its choices there.
    u16 folded(u32 token, u32 rank, u32 h) const {
        float total = 0.0f;
        for (u32 k = 0; k < kChoices; ++k) {
            if (holder(token, k) == rank) total += bf16_to_float(returned(rank_, token, k, h));
        }
        return float_to_bf16(total);
    }
    void check_row(u32 at, u32 source, u32 token, u32 k) const {
        for (u32 h = 0; h < kHidden; ++h) {
            expect(expanded_x_.as<u16>()[at * kHidden + h] == element(lap_, source, token, h), "expanded x");
        }
        for (u32 s = 0; s < kScales; ++s) {
            expect(expanded_scales_.as<u32>()[at + s * stride_] == scale(source, token, s), "expanded scales");
        }
        expect(expanded_weights_.as<float>()[at] == static_cast<float>(weight(source, token, k)), "expanded weight");
    }

    const u32 lap_, rank_, tokens_;
    Buffer& buffer_;
    std::vector<u16> x_, bias_;
    std::vector<u32> scales_;
    std::vector<i64> idx_;
    std::vector<float> weights_;
    std::vector<i32> per_rank_, per_expert_;
    std::vector<u8> in_rank_;
    std::vector<i32> token_row_, row_token_, prefix_, source_tokens_, rows_to_rank_;
    std::vector<i32> rank_sums_, expert_sums_, expert_rows_, statistics_, ordinals_, every_choice_;
    const bool numbers_, by_senders_;
    std::vector<Row> rows_;
    u32 expanded_rows_ = 0, stride_ = 0;
    Output recv_x_, recv_scales_, recv_idx_, recv_weights_, recv_source_;
    Output own_counts_, chunk_counts_, slots_, expanded_x_, expanded_weights_, expanded_scales_, columns_;
    Output folded_x_, folded_weights_, combined_x_, combined_weights_;
    Output returned_x_, summed_;
};

inline void run(uint64_t seed, const Setup& setup) {
    World world;
    planted::run_world(kRanks, seed, [&](int r) {
        Buffer buffer(world, static_cast<u32>(r), setup);
        for (u32 i = 0; i < kLaps; ++i) {
            Batch batch(buffer, i);
            end_well(buffer, batch.dispatch());
            batch.check_dispatch();
            end_well(buffer, batch.combine());
            batch.check_combine();
            batch.end();
        }
        buffer.meet(world);
        buffer.runtime().drain();
        buffer.meet(world);
    });
}

}  // namespace protocol::expanded
