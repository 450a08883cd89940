// Code shared by scenarios of two hops: tokens of which every rank knows all values, and a rank's dispatch of its own.
#pragma once

#include "host/modes/normal/two_hops.h"
#include "ranks.h"

namespace protocol::two_hop_mode {

using host::normal::Sizes;
using Plan = deep_ep::two_hops::Plan;

constexpr u32 kTopk = 3, kExpertsPerRank = 2, kHidden = 24, kRowBytes = 2 * kHidden;
constexpr u32 kScales[] = {3, 4, 0};               // by lap; four can be copied in pieces
constexpr u32 kTokens[] = {56, 0, 21, 1, 12, 35};  // Routing::tokens(); more than a mark's node rows
constexpr u32 kChunkRows = 2;                      // the least result of `nodes.bytes_in_flight` for these rows

// A dispatch's record of a row's origin.
struct Source {
    i32 token, node_row;
};

// Every value of a run: a hash of its lap, its kind, and its position.
template <class... Where>
u32 mixed(u32 what, Where... where) {
    u32 hash = what * 0x9e3779b9u;
    for (const u32 part : {static_cast<u32>(where)...}) {
        hash = (hash ^ part) * 0x85ebca6bu;
        hash ^= hash >> 15;
    }
    return (hash * 0xc2b2ae35u) >> 3;
}
enum What : u32 { kX = 1, kWeight, kScale, kExpert, kResult, kResultWeight, kBias, kSeen };

// Sums of these depend on the order: values cancel, and small ones are lost in large ones.
inline float value(u32 random) {
    constexpr float kValues[] = {1, -3, 0.25f, 7, 96, -0.125f, 4096, -4096, 1 << 20, -(1 << 20), 1 << 26, -(1 << 26)};
    return kValues[random % std::size(kValues)];
}
inline u16 rounded(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float widened(u16 value) {
    const u32 bits = u32{value} << 16;
    float wide;
    __builtin_memcpy(&wide, &bits, sizeof(wide));
    return wide;
}

// The tokens and their routes, which all ranks know, and so what each rank must receive.
struct Routing {
    u32 lap, ranks, per_node;
    wire::RankMask lost;  // ranks that are left out: they have no tokens, and receive none

    // Ranks take turns, so that in each lap a different one has row streams without node rows.
    u32 tokens(u32 rank) const { return lost.has(rank) ? 0 : kTokens[(rank + lap) % ranks % std::size(kTokens)]; }
    u32 experts() const { return kExpertsPerRank * ranks; }
    u32 scales() const { return kScales[lap % std::size(kScales)]; }
    // Some choices are none, some tokens go to no rank. A token's other choices differ.
    i64 expert(u32 source, u32 token, u32 k) const {
        const u32 random = mixed(kExpert, lap, source, token), first = random / 8 % experts(),
                  step = 1 + random % 2 * 2;
        if (random % 13 == 0 || mixed(kExpert, lap, source, token, k) % 6 == 0) return -1;
        return (first + k * step) % experts();
    }
    bool goes(u32 source, u32 token, u32 to) const {
        for (u32 k = 0; k < kTopk; ++k) {
            if (local_expert(source, token, k, to) >= 0) return true;
        }
        return false;
    }
    bool goes_to_node(u32 source, u32 token, u32 node) const {
        for (u32 d = 0; d < per_node; ++d) {
            if (goes(source, token, node * per_node + d)) return true;
        }
        return false;
    }
    i64 local_expert(u32 source, u32 token, u32 k, u32 to) const {
        const i64 local = expert(source, token, k) - i64{to} * kExpertsPerRank;
        return !lost.has(to) && local >= 0 && local < kExpertsPerRank ? local : -1;
    }
    bool notes_holders() const { return lap % 2 != 0; }
    u16 x(u32 source, u32 token, u32 h) const { return static_cast<u16>(mixed(kX, lap, source, token, h)); }
    u32 scale(u32 source, u32 token, u32 i) const { return mixed(kScale, lap, source, token, i); }
    float weight(u32 source, u32 token, u32 k) const { return value(mixed(kWeight, lap, source, token, k)); }
    // `turn`: index of the combine within a lap.
    float result(u32 turn, u32 holder, u32 source, u32 token, u32 h) const {
        return value(mixed(kResult, lap, turn, holder, source, token, h));
    }
    float result_weight(u32 turn, u32 holder, u32 source, u32 token, u32 k) const {
        return value(mixed(kResultWeight, lap, turn, holder, source, token, k));
    }
    static float bias(u32 number, u32 rank, u32 token, u32 h) { return value(mixed(kBias, number, rank, token, h)); }

    // The order of docs/two_hops.md: by nodes, the own node by its ranks; other nodes' sums as returned by `passed_on`.
    template <class Value, class PassedOn>
    float sum(u32 owner, u32 token, Value value, PassedOn passed_on) const {
        float sum = 0.0f;
        for (u32 node = 0; node < ranks / per_node; ++node) {
            float of_node = 0.0f;
            for (u32 to = node * per_node; to < (node + 1) * per_node; ++to) {
                if (goes(owner, token, to)) (node == owner / per_node ? sum : of_node) += value(to);
            }
            if (node != owner / per_node && goes_to_node(owner, token, node)) sum += passed_on(of_node);
        }
        return sum;
    }
};

// A rank's plans for its own tokens, and for those it receives and forwards.
class Planned {
  public:
    Planned(const Routing& of, u32 tokens)
        : nodes_(of.ranks / of.per_node),
          per_node_(of.per_node),
          sent_(nodes_),
          sent_token_(nodes_ * tokens),
          sent_marks_(nodes_ * deep_ep::two_hops::marks(tokens) * per_node_),
          node_row_(tokens * nodes_),
          rows_to_rank_(of.ranks),
          forwarded_(wire::kRoles * nodes_),
          node_rows_(of.ranks),
          rank_prefix_(of.ranks),
          sent_ranks_(nodes_ * tokens * wire::set_words(per_node_)) {}

    Plan plan() {
        return {.sent = sent_.data(),
                .sent_token = sent_token_.data(),
                .sent_ranks = sent_ranks_.data(),
                .sent_marks = sent_marks_.data(),
                .node_row = node_row_.data(),
                .rows_to_rank = rows_to_rank_.data(),
                .forwarded = forwarded_.data(),
                .node_rows = node_rows_.data(),
                .rank_prefix = rank_prefix_.data(),
                .table = table_.data(),
                .holders = holders_.data(),
                .table_rows = static_cast<u32>(table_.size()) / per_node_};
    }
    // `holds`: a combine takes each choice's weight from the rank that holds it.
    void make_table(u32 rows, bool holds) {
        table_.resize(rows * per_node_);
        holders_.resize(holds ? rows * kTopk : 0);
    }

  private:
    const u32 nodes_, per_node_;
    std::vector<i32> sent_, sent_token_, sent_marks_, node_row_, rows_to_rank_, forwarded_, node_rows_, rank_prefix_;
    std::vector<u32> sent_ranks_;
    std::vector<i32> table_, holders_;
};

// A rank's tokens, sent to their destinations: its plans, and what it receives.
class Dispatched {
  public:
    Dispatched(Buffer& buffer, u32 lap)
        : routing_{lap, buffer.setup.nodes.ranks, buffer.setup.nodes.per_node, {{buffer.setup.nodes.lost}}},
          rank_(buffer.rank),
          tokens_(routing_.tokens(rank_)),
          sizes_{tokens_, kRowBytes, kTopk, routing_.experts(), sizeof(i64), routing_.scales()},
          buffer_(buffer),
          planned_(routing_, tokens_),
          x_(tokens_ * kHidden),
          scales_(tokens_ * routing_.scales()),
          idx_(tokens_ * kTopk),
          weights_(tokens_ * kTopk),
          per_rank_(routing_.ranks),
          per_expert_(routing_.experts()),
          in_rank_(tokens_ * routing_.ranks) {
        for (u32 t = 0; t < tokens_; ++t) {
            for (u32 h = 0; h < kHidden; ++h) x_[t * kHidden + h] = routing_.x(rank_, t, h);
            for (u32 i = 0; i < routing_.scales(); ++i) {
                scales_[t * routing_.scales() + i] = routing_.scale(rank_, t, i);
            }
            for (u32 k = 0; k < kTopk; ++k) {
                idx_[t * kTopk + k] = routing_.expert(rank_, t, k);
                weights_[t * kTopk + k] = routing_.weight(rank_, t, k);
            }
        }
        for (u32 source = 0; source < routing_.ranks; ++source) {
            i32 node_row = 0;
            for (u32 t = 0; t < routing_.tokens(source); ++t) {
                if (routing_.goes(source, t, rank_)) rows_.push_back({source, t, node_row});
                node_row += routing_.goes_to_node(source, t, rank_ / routing_.per_node);
            }
        }
    }

    ~Dispatched() { settle(); }

    struct Row {
        u32 source, token;
        i32 node_row;
    };
    // The rows that this rank must receive.
    const std::vector<Row>& rows() const { return rows_; }
    u32 count() const { return static_cast<u32>(rows_.size()); }
    std::string whose() const {
        return "rank " + std::to_string(rank_) + ", lap " + std::to_string(routing_.lap) + ": ";
    }

    std::shared_ptr<host::Call> notify() {
        runtime().wait_launch(host::normal::layout(runtime(), sizes_, address(idx_), address(per_rank_), 0,
                                                   address(per_expert_), address(in_rank_), buffer_.blocks));
        return host::two_hops::notify(runtime(), sizes_, address(in_rank_), address(per_expert_), address(idx_),
                                      planned_.plan(), {}, 0, routing_.lap % 2 != 0, buffer_.blocks);
    }
    // After notify(). `unused`: rows of the output that no rank sends.
    void dispatch(host::Call& call, bool arena, u32 unused = 0) {
        if (host::normal::lacks_counts(call)) host::normal::counts(call);
        runtime().wait_counts(call);
        const auto reason = static_cast<u32>(call.reason());
        expect(__atomic_load_n(&call.outcome->counts_ready, __ATOMIC_ACQUIRE) != 0,
               whose() + "no counts, for reason " + std::to_string(reason));
        expect(host::normal::total_rows(call) == static_cast<i32>(count()), whose() + "rows");
        check_counts(call);
        planned_.make_table(static_cast<u32>(host::normal::forwarded_rows(call)), routing_.notes_holders());
        unused_ = unused;
        const u32 rows = count() + unused;
        recv_x_ = Output(runtime(), arena, u64{rows} * kRowBytes);
        recv_scales_ = Output(runtime(), arena, u64{rows} * routing_.scales() * sizeof(u32));
        recv_idx_ = Output(runtime(), arena, rows * kTopk * sizeof(i64));
        recv_weights_ = Output(runtime(), arena, rows * kTopk * sizeof(float));
        recv_source_ = Output(runtime(), arena, rows * sizeof(Source));
        host::normal::DispatchTensors with = tensors();
        with.topk_idx = address(idx_);
        with.topk_weights = address(weights_);
        with.recv_x = recv_x_.address();
        with.recv_scales = recv_scales_.address();
        with.recv_topk_idx = recv_idx_.address();
        with.recv_topk_weights = recv_weights_.address();
        with.recv_src_idx = recv_source_.address();
        host::two_hops::dispatch(runtime(), call, sizes_, with, planned_.plan(), rows, false, buffer_.blocks);
    }
    // The same rows again.
    std::shared_ptr<host::Call> dispatch_again(const Output& x, const Output& scales) {
        const Sizes sizes{tokens_, kRowBytes, 0, 0, sizeof(i64), routing_.scales()};
        host::normal::DispatchTensors with = tensors();
        with.recv_x = x.address();
        with.recv_scales = scales.address();
        auto call = host::normal::open(runtime(), wire::Kind::kCachedDispatch, sizes, routing_.lap);
        host::two_hops::dispatch(runtime(), *call, sizes, with, planned_.plan(), count(), true, buffer_.blocks);
        return call;
    }
    // `tensors`: everything except the origin of rows. `topk`: number of weights that return with rows.
    std::shared_ptr<host::Call> combine(host::normal::CombineTensors tensors, u32 topk = 0) {
        const Sizes sizes{tokens_, kRowBytes, topk, 0};
        tensors.src_idx = recv_source_.address();
        auto call = host::normal::open(runtime(), wire::Kind::kCombine, sizes, routing_.lap);
        host::two_hops::combine(runtime(), *call, sizes, tensors, planned_.plan(), count(), true, buffer_.blocks);
        return call;
    }

    void check_dispatch() const {
        check_rows(recv_x_, "first");
        check_scales(recv_scales_, "first");
        for (u32 row = 0; row < count(); ++row) {
            const auto [source, token, node_row] = rows_[row];
            const std::string what = whose() + "row " + std::to_string(row) + ": ";
            const Source from = recv_source_.as<Source>()[row];
            expect(from.token == static_cast<i32>(token), what + "token at the source");
            expect(from.node_row == node_row, what + "node row");
            for (u32 k = 0; k < kTopk; ++k) {
                const i64 local = routing_.local_expert(source, token, k, rank_);
                expect(recv_idx_.as<i64>()[row * kTopk + k] == local, what + "expert");
                expect(recv_weights_.as<float>()[row * kTopk + k] ==
                           (local >= 0 ? routing_.weight(source, token, k) : 0.0f),
                       what + "weight");
            }
        }
        for (u32 i = count() * kTopk; i < (count() + unused_) * kTopk; ++i) {
            expect(recv_idx_.as<i64>()[i] == -1 && recv_weights_.as<float>()[i] == 0.0f, whose() + "an unused row");
        }
    }
    void check_rows(const Output& x, const std::string& when) const {
        for (u32 row = 0; row < count(); ++row) {
            for (u32 h = 0; h < kHidden; ++h) {
                expect(x.as<u16>()[row * kHidden + h] == routing_.x(rows_[row].source, rows_[row].token, h),
                       whose() + "row " + std::to_string(row) + ", " + when + ": x");
            }
        }
    }
    void check_scales(const Output& scales, const std::string& when) const {
        for (u32 i = 0; i < count() * routing_.scales(); ++i) {
            const auto [source, token, node_row] = rows_[i / routing_.scales()];
            expect(scales.as<u32>()[i] == routing_.scale(source, token, i % routing_.scales()),
                   whose() + "row " + std::to_string(i / routing_.scales()) + ", " + when + ": scales");
        }
    }
    // Checks that nothing outside of the received data was written, then releases its memory.
    void release() {
        for (Output* output : {&recv_x_, &recv_scales_, &recv_idx_, &recv_weights_, &recv_source_}) {
            output->check(whose());
            output->release();
        }
    }

  protected:
    host::Runtime& runtime() { return buffer_.runtime(); }
    // A failed check ends a scenario before its kernels have ended, which still use these members. Therefore a derived
    // class with more members calls this first.
    void settle() {
        try {
            runtime().settle(kSecond);
        } catch (const cpu::DeadlockError&) {  // they never will
        }
    }
    template <class T>
    static u64 address(std::vector<T>& vector) {
        return reinterpret_cast<u64>(vector.data());
    }

    const Routing routing_;
    const u32 rank_, tokens_;
    const Sizes sizes_;
    Buffer& buffer_;

  private:
    host::normal::DispatchTensors tensors() {
        host::normal::DispatchTensors tensors;
        tensors.x = address(x_);
        tensors.scales = address(scales_);
        tensors.scales_stride = {routing_.scales(), 1};
        return tensors;
    }
    void check_counts(const host::Call& call) const {
        for (u32 e = 0; e < kExpertsPerRank; ++e) {
            i32 expected = 0;
            for (const auto& [source, token, node_row] : rows_) {
                for (u32 k = 0; k < kTopk; ++k) expected += routing_.local_expert(source, token, k, rank_) == e;
            }
            expect(call.words.get()[e] == expected, whose() + "rows of expert " + std::to_string(e));
        }
        i32 forwarded = 0;
        for (u32 source = 0; source < routing_.ranks; ++source) {
            if (source / routing_.per_node == rank_ / routing_.per_node
                    ? source != rank_
                    : wire::forwarder_of(routing_.lost, routing_.per_node, rank_ / routing_.per_node,
                                         source % routing_.per_node) != rank_) {
                continue;
            }
            for (u32 t = 0; t < routing_.tokens(source); ++t) {
                forwarded += routing_.goes_to_node(source, t, rank_ / routing_.per_node);
            }
        }
        expect(host::normal::forwarded_rows(call) == forwarded, whose() + "node rows to pass on");
    }

    Planned planned_;
    std::vector<u16> x_;
    std::vector<u32> scales_;
    std::vector<i64> idx_;
    std::vector<float> weights_;
    std::vector<i32> per_rank_, per_expert_;
    std::vector<u8> in_rank_;
    std::vector<Row> rows_;
    u32 unused_ = 0;
    Output recv_x_, recv_scales_, recv_idx_, recv_weights_, recv_source_;
};

}  // namespace protocol::two_hop_mode
