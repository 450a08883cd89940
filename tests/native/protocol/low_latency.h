// Low-latency dispatch and combine through a Runtime, on ranks that are threads: as one launch and in two parts, with
// results pushed and published; or rows once to each node, and sums back. Every value is checked.
#pragma once

#include <algorithm>
#include <cmath>

#include "device/logfmt.h"
#include "host/modes/low_latency/calls.h"
#include "ranks.h"

namespace protocol::low_latency_mode {

using host::low_latency::Sizes;

constexpr u32 kNodeRanks = 4, kPerNode = 2;

struct Case {
    Sizes sizes;
    u32 tokens[kNodeRanks];
    unsigned blocks;
    u32 ranks = kRanks;

    u32 local() const { return sizes.experts / ranks; }
    u32 rows() const { return ranks * sizes.max_tokens; }  // of an expert
    bool cast() const { return sizes.scales != Scales::kNone; }
    u32 x_bytes() const { return sizes.hidden * (cast() ? 1 : 2); }
    u32 groups() const { return sizes.hidden / kScaleGroup; }
};

// Two units of tokens, and blocks with unequal shares; rows of two groups that are cast; rows that take two puts;
// results of two groups that travel as LogFMT, and one block that puts them to all ranks.
constexpr Case kUnits = {{40, 16, 3, 6}, {37, 0, 40}, 7};
constexpr Case kCast = {{4, 2 * kScaleGroup, 2, 6, sizeof(i64), Scales::kExponents}, {4, 3, 0}, 2};
constexpr Case kLog = {{5, 2 * kLogGroup, 2, 6, sizeof(i64), Scales::kNone, true}, {5, 3, 4}, 1};
constexpr Case kPuts = {{136, 8, 1, 3}, {136, 2, 0}, 2};
// On two nodes: two units of tokens; rows that are cast, with sums made by their owners; rows that take two puts.
constexpr Case kNodeUnits = {
    {40, 16, 3, 12, sizeof(i64), Scales::kNone, false, kPerNode, true}, {37, 0, 40, 5}, 3, kNodeRanks};
constexpr Case kNodeCast = {
    {4, 2 * kScaleGroup, 2, 8, sizeof(i64), Scales::kExponents, false, kPerNode}, {4, 3, 0, 4}, 2, kNodeRanks};
constexpr Case kNodePuts = {
    {136, 8, 2, 4, sizeof(i64), Scales::kNone, false, kPerNode, true}, {130, 2, 0, 133}, 2, kNodeRanks};

// Some choices are none, some repeat the token's first expert.
inline i64 choice(const Case& of, u32 number, u32 rank, u32 token, u32 k) {
    const u32 mixed = token * (number + 3) + rank * 5 + k * 2 + token / 7;
    if (k != 0 && token % 5 == 2) return choice(of, number, rank, token, 0);
    return (token + k) % 7 == 6 ? -1 : static_cast<i64>(mixed % of.sizes.experts);
}
inline bool chooses(const Case& of, u32 number, u32 rank, u32 token, u32 expert) {
    for (u32 k = 0; k < of.sizes.topk; ++k) {
        if (choice(of, number, rank, token, k) == expert) return true;
    }
    return false;
}
// Combine leaves these out too.
inline bool left_out(u32 token, u32 k) { return (token + 2 * k) % 11 == 0; }
inline u32 weight(u32 token, u32 k) { return 1 + (token + k) % 3; }
// Small, so that sums of products are exact in bfloat16.
inline u32 result(u32 expert, u32 source, u32 token, u32 h) { return (expert * 3 + source * 5 + token * 7 + h) % 27; }

// Values that survive the cast to LogFMT exactly: their magnitudes except zero are within a factor of 15. Some groups
// for rank 1 stay unchanged.
inline float log_result(u32 expert, u32 source, u32 token, u32 h) {
    const float value = static_cast<float>(result(expert, source, token, h) % 16);
    return source == 1 && token % 2 == 0 && h >= kLogGroup ? value : value / 32;
}

// Values to cast: up to 12 times a power of two, the largest in every group. The scale is then 2^-5 times that power.
inline u32 power(u32 token, u32 group) { return (token + group) % 3; }
inline float cast_element(u32 number, u32 rank, u32 token, u32 h) {
    const u32 mixed = h + token * 3 + rank * 5 + number;
    const float value = static_cast<float>((mixed % 13) << power(token, h / kScaleGroup));
    return mixed % 2 == 0 ? value : -value;
}
inline float decoded(u8 e4m3, u8 exponent) {
    const int exponent_bits = e4m3 >> 3 & 0xf;
    const float mantissa = static_cast<float>(e4m3 & 7) / 8 + static_cast<float>(exponent_bits != 0);
    const float magnitude = std::ldexp(mantissa, std::max(exponent_bits, 1) - 7 + exponent - 127);
    return (e4m3 & 0x80) != 0 ? -magnitude : magnitude;
}

// One dispatch of a rank's tokens, and combines of the experts' results. `lost`: a rank that may be masked at any time.
// Its data arrives as a whole or not at all, and its own calls fail from then on.
class Trip {
  public:
    Trip(Buffer& buffer, const Case& of, u32 number, u32 lost = wire::kNoRank)
        : lost_(lost),
          buffer_(buffer),
          of_(of),
          number_(number),
          rank_(buffer.rank),
          tokens_(of.tokens[rank_]),
          x_(buffer.runtime(), false, u64{tokens_} * of.sizes.hidden * sizeof(u16)),
          recv_x_(buffer.runtime(), false, u64{of.local()} * of.rows() * of.x_bytes()),
          recv_scales_(buffer.runtime(), false, of.cast() ? u64{of.local()} * of.rows() * sizeof(u32) : 0),
          results_(buffer.runtime(), buffer.setup.arena, u64{of.local()} * of.rows() * of.sizes.hidden * sizeof(u16)),
          sums_(buffer.runtime(), false, u64{tokens_} * of.sizes.hidden * sizeof(u16)),
          idx_(tokens_ * of.sizes.topk),
          weights_(tokens_ * of.sizes.topk),
          count_(of.local()),
          stats_(of.local(), kStats),
          row_token_(of.local() * of.rows()),
          ranges_(of.local() * of.ranks),
          waited_(of.ranks),
          places_(host::low_latency::places_words(of.sizes, of.ranks, tokens_)) {
        for (u32 e = 0; e < of.local(); ++e) {
            auto& rows = rows_.emplace_back();
            for (u32 source = 0; source < of.ranks; ++source) {
                for (u32 t = 0; t < of.tokens[source]; ++t) {
                    if (chooses(of, number, source, t, rank_ * of.local() + e)) rows.push_back({source, t});
                }
            }
        }
        for (u32 t = 0; t < tokens_; ++t) {
            for (u32 h = 0; h < of.sizes.hidden; ++h) x_.as<u16>()[t * of.sizes.hidden + h] = sent(rank_, t, h);
            for (u32 k = 0; k < of.sizes.topk; ++k) {
                idx_[t * of.sizes.topk + k] = choice(of, number, rank_, t, k);
                weights_[t * of.sizes.topk + k] = static_cast<float>(weight(t, k));
            }
        }
    }

    void dispatch(bool whole) {
        host::low_latency::DispatchTensors tensors;
        tensors.x = x_.address();
        tensors.topk_idx = address(idx_);
        if (of_.sizes.weighted) tensors.topk_weights = address(weights_);
        tensors.recv_x = recv_x_.address();
        tensors.recv_scales = recv_scales_.address();
        tensors.scales_stride = of_.rows();
        tensors.recv_count = address(count_);
        tensors.stats = address(stats_);
        tensors.waited_ns = address(waited_);
        call_ = host::low_latency::dispatch(buffer_.runtime(), of_.sizes, tokens_, tensors, handle(), launches(whole));
        if (whole) return finish_dispatch();
        await_half();
        write_over_sent();
    }
    void receive() {
        if (failed_) return;
        host::low_latency::finish(buffer_.runtime(), *call_);
        finish_dispatch();
    }
    // This rank is masked.
    bool failed() const { return failed_; }

    // `publish`: peers that can access this rank's results read them in place.
    void combine(bool whole, bool publish) {
        if (failed_) return;
        write_results();
        for (u32 i = 0; i < idx_.size(); ++i) {
            const u32 t = i / of_.sizes.topk, k = i % of_.sizes.topk;
            idx_[i] = leaves_out(t, k) ? -1 : choice(of_, number_, rank_, t, k);
        }
        std::fill(sums_.as<u16>(), sums_.as<u16>() + tokens_ * of_.sizes.hidden, u16{0xffff});
        host::low_latency::CombineTensors tensors;
        tensors.x = results_.address();
        tensors.topk_idx = address(idx_);
        if (!of_.sizes.weighted) tensors.topk_weights = address(weights_);
        tensors.combined_x = sums_.address();
        tensors.waited_ns = address(waited_);
        tensors.publish = publish;
        call_ = host::low_latency::combine(buffer_.runtime(), of_.sizes, tokens_, tensors, handle(), number_,
                                           launches(whole));
        if (whole) return finish_combine();
        await_half();
        if (!publish) write_over_results();
    }
    void receive_sums() {
        if (failed_) return;
        host::low_latency::finish(buffer_.runtime(), *call_);
        finish_combine();
    }
    void end() { results_.release(); }

  private:
    static constexpr i32 kStats = 100;

    template <class T>
    static u64 address(std::vector<T>& vector) {
        return reinterpret_cast<u64>(vector.data());
    }
    host::low_latency::HandleTensors handle() { return {address(row_token_), address(ranges_), address(places_)}; }
    host::low_latency::Launches launches(bool whole) const { return {whole, of_.blocks, 1 + number_ % 2}; }
    bool leaves_out(u32 token, u32 k) const { return !of_.sizes.weighted && left_out(token, k); }
    u16 sent(u32 rank, u32 token, u32 h) const {
        if (of_.cast()) return float_to_bf16(cast_element(number_, rank, token, h));
        return element(number_, rank, token, h);
    }
    std::string whose() const { return "rank " + std::to_string(rank_) + ", trip " + std::to_string(number_) + ": "; }

    // Callers may overwrite these as soon as the sending part has ended.
    void write_over_sent() {
        std::fill(x_.as<u16>(), x_.as<u16>() + tokens_ * of_.sizes.hidden, u16{0xffff});
        std::fill(idx_.begin(), idx_.end(), 0);
        if (of_.sizes.weighted) std::fill(weights_.begin(), weights_.end(), 1e9f);
    }
    void write_over_results() {
        std::fill(results_.as<u16>(), results_.as<u16>() + of_.local() * of_.rows() * of_.sizes.hidden, u16{0xffff});
    }
    float result_of(u32 expert, u32 source, u32 token, u32 h) const {
        if (of_.sizes.logfmt) return log_result(expert, source, token, h);
        return static_cast<float>(result(expert, source, token, h));
    }
    // Rows that no token occupies keep their contents.
    void write_results() {
        for (u32 e = 0; e < of_.local(); ++e) {
            for (u32 row = 0; row < rows_[e].size(); ++row) {
                const auto [source, t] = rows_[e][row];
                for (u32 h = 0; h < of_.sizes.hidden; ++h) {
                    results_.as<u16>()[(e * of_.rows() + row) * of_.sizes.hidden + h] =
                        float_to_bf16(result_of(rank_ * of_.local() + e, source, t, h));
                }
            }
        }
    }
    // Returns false if the rank is masked, and so stops.
    bool ends_well() {
        buffer_.runtime().wait(*call_);
        const wire::Failure failure = call_->failure();
        failed_ = failure.mark != 0;
        const bool masked = rank_ == lost_ && failure.cause == wire::kMasked;
        expect(!failed_ || masked, whose() + "failed: " + wire::phase_name(static_cast<wire::Phase>(failure.phase)));
        return !failed_;
    }
    // Other ranks wait for what is forwarded; this rank's host does not.
    void await_half() {
        if (ends_well() && host::low_latency::forwards(*call_)) {
            host::low_latency::forward(buffer_.runtime(), *call_);
        }
    }
    void finish_dispatch() {
        if (!ends_well()) return;
        buffer_.runtime().retire(call_);
        write_over_sent();
        leave_out_lost();
        check_rows();
    }
    void finish_combine() {
        if (!ends_well()) return;
        buffer_.runtime().retire(call_);
        write_over_results();
        check_sums();
    }
    // If no expert here received a row from the lost rank, none is expected.
    void leave_out_lost() {
        if (lost_ == wire::kNoRank) return;
        for (u32 e = 0; e < of_.local(); ++e) {
            if (static_cast<u32>(ranges_[e * of_.ranks + lost_]) != 0) return;
        }
        for (auto& rows : rows_) std::erase_if(rows, [this](const Row& row) { return row.source == lost_; });
    }

    void check_rows() const {
        for (u32 e = 0; e < of_.local(); ++e) {
            const std::string what = whose() + "local expert " + std::to_string(e) + ", ";
            const auto& rows = rows_[e];
            const auto count = static_cast<i32>(rows.size());
            expect(count_[e] == count, what + std::to_string(count_[e]) + " rows, expected " + std::to_string(count));
            expect(stats_[e] == kStats + count, what + "statistics");
            i64 begin = 0;
            for (u32 source = 0; source < of_.ranks; ++source) {
                const auto of_source = [&](const Row& row) { return row.source == source; };
                const i64 range = begin << 32 | std::count_if(rows.begin(), rows.end(), of_source);
                expect(ranges_[e * of_.ranks + source] == range, what + "range");
                begin += static_cast<u32>(range);
            }
            for (u32 row = 0; row < rows.size(); ++row) check_row(e, row, what + "row " + std::to_string(row) + ": ");
        }
        for (const Output* output : {&recv_x_, &recv_scales_}) output->check(whose());
    }
    void check_row(u32 e, u32 row, const std::string& what) const {
        const auto [source, t] = rows_[e][row];
        const u32 hidden = of_.sizes.hidden, index = e * of_.rows() + row;
        expect(row_token_[index] == static_cast<i32>(t), what + "token at the source");
        if (source == lost_ && is_zero(index)) return;
        for (u32 h = 0; h < hidden; ++h) {
            if (!of_.cast()) {
                expect(recv_x_.as<u16>()[index * hidden + h] == sent(source, t, h), what + "x");
                continue;
            }
            const u32 group = h / kScaleGroup;
            const u32 exponents = recv_scales_.as<u32>()[index], exponent = exponents >> 8 * group & 0xff;
            expect(exponents >> 8 * of_.groups() == 0, what + "exponents of groups that do not exist");
            expect(exponent == 127 - 5 + power(t, group), what + "exponent");
            expect(decoded(recv_x_.data()[index * hidden + h], static_cast<u8>(exponent)) ==
                       cast_element(number_, source, t, h),
                   what + "x, cast");
        }
    }
    bool is_zero(u32 index) const {
        const u8* const row = recv_x_.data() + index * of_.x_bytes();
        return std::all_of(row, row + of_.x_bytes(), [](u8 byte) { return byte == 0; }) &&
               (!of_.cast() || recv_scales_.as<u32>()[index] == 0);
    }
    // Either all include the results of the lost rank, or none do.
    void check_sums() const {
        const u32 wrong = wrong_sum(wire::kNoRank);
        expect(wrong == tokens_ || (lost_ != wire::kNoRank && wrong_sum(lost_) == tokens_),
               whose() + "sum of token " + std::to_string(wrong));
        sums_.check(whose());
    }
    // The first token whose sum is not that of its results except a rank's; the number of tokens if there is none.
    u32 wrong_sum(u32 without) const {
        for (u32 t = 0; t < tokens_; ++t) {
            for (u32 h = 0; h < of_.sizes.hidden; ++h) {
                float sum = 0;
                for (u32 k = 0; k < of_.sizes.topk; ++k) {
                    const i64 id = choice(of_, number_, rank_, t, k);
                    if (id < 0 || leaves_out(t, k) || static_cast<u32>(id) / of_.local() == without) continue;
                    sum += static_cast<float>(weight(t, k)) * result_of(static_cast<u32>(id), rank_, t, h);
                }
                if (sums_.as<u16>()[t * of_.sizes.hidden + h] != float_to_bf16(sum)) return t;
            }
        }
        return tokens_;
    }

    struct Row {
        u32 source, token;
    };
    const u32 lost_;
    bool failed_ = false;
    Buffer& buffer_;
    const Case& of_;
    const u32 number_, rank_, tokens_;
    std::vector<std::vector<Row>> rows_;  // received by this rank, by local expert
    Output x_, recv_x_, recv_scales_, results_, sums_;
    std::vector<i64> idx_;
    std::vector<float> weights_;
    std::vector<i32> count_, stats_, row_token_;
    std::vector<i64> ranges_, waited_;
    std::vector<u32> places_;
    std::shared_ptr<host::Call> call_;
};

inline void make_room(Setup& setup, std::initializer_list<const Case*> cases = {&kUnits, &kCast, &kPuts, &kLog}) {
    for (const Case* of : cases) {
        const u64 bytes = host::low_latency::region_bytes(of->sizes, of->ranks, setup.fabric != "peer");
        setup.region_bytes = std::max(setup.region_bytes, wire::align_up(bytes, 128));
    }
}

inline void check_puts(Buffer& buffer, std::initializer_list<const Case*> cases) {
    for (const Case* of : cases) {
        expect(host::low_latency::put_bytes(buffer.runtime(), of->sizes) <=
                   host::low_latency::max_put_bytes(buffer.runtime(), of->sizes),
               "a put does not fit into a ring");
    }
}

inline void run(uint64_t seed, Setup setup) {
    make_room(setup);
    World world;
    planted::run_world(kRanks, seed, [&](int r) {
        Buffer buffer(world, static_cast<u32>(r), setup);
        check_puts(buffer, {&kUnits, &kCast, &kPuts, &kLog});
        Trip first(buffer, kUnits, 0);
        first.dispatch(true);
        first.combine(true, false);
        first.combine(true, true);
        first.end();
        // As many trips open at once as there are regions; hooks may be called in any order.
        Trip cast(buffer, kCast, 1), units(buffer, kUnits, 2);
        cast.dispatch(false);
        units.dispatch(false);
        units.receive();
        cast.receive();
        cast.combine(false, false);
        units.combine(false, true);
        cast.receive_sums();
        units.receive_sums();
        cast.end();
        units.end();
        Trip puts(buffer, kPuts, 3);
        puts.dispatch(true);
        puts.combine(true, false);
        puts.end();
        Trip log(buffer, kLog, 4);
        log.dispatch(true);
        log.combine(true, false);
        log.combine(false, false);
        log.receive_sums();
        log.end();
        buffer.meet(world);
        buffer.runtime().drain();
        buffer.meet(world);
    });
}

// Rows go once to each node, and are forwarded before a hook is called or within one launch.
inline void run_nodes(uint64_t seed, Setup setup) {
    setup.nodes = {kNodeRanks, kPerNode};
    make_room(setup, {&kNodeUnits, &kNodeCast, &kNodePuts});
    World world(kNodeRanks);
    planted::run_world(kNodeRanks, seed, [&](int r) {
        Buffer buffer(world, static_cast<u32>(r), setup);
        check_puts(buffer, {&kNodeUnits, &kNodeCast, &kNodePuts});
        Trip first(buffer, kNodeUnits, 0);
        first.dispatch(true);
        first.combine(true, false);
        first.combine(true, true);
        first.end();
        // Ranks may call hooks in different orders.
        Trip cast(buffer, kNodeCast, 1), units(buffer, kNodeUnits, 2);
        Trip* const order[] = {r % 2 == 0 ? &cast : &units, r % 2 == 0 ? &units : &cast};
        cast.dispatch(false);
        units.dispatch(false);
        for (Trip* trip : order) trip->receive();
        cast.combine(false, false);
        units.combine(false, false);
        for (Trip* trip : order) trip->receive_sums();
        cast.end();
        units.end();
        Trip puts(buffer, kNodePuts, 3);
        puts.dispatch(true);
        puts.combine(true, false);
        puts.combine(false, true);
        puts.receive_sums();
        puts.end();
        buffer.meet(world);
        buffer.runtime().drain();
        buffer.meet(world);
    });
}

}  // namespace protocol::low_latency_mode
