// Code shared by the scenarios of whole operations: ranks that are threads, each with a Runtime as Python would make
// it, and tokens whose rows and sums are all known.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "../program.h"
#include "host/control/shared_control.h"
#include "host/modes/normal/calls.h"
#include "host/session/runtime.h"
#include "sim/host/launcher.h"
#include "sim/host/memory.h"
#include "sim/host/teller_agent.h"
#include "sim/host/warden_agent.h"

namespace protocol {

using namespace deep_ep;
using planted::expect;

constexpr u32 kRanks = 3;

// The ranks. Those of a node are mapped; with one node, as Setup::fabric specifies.
struct Nodes {
    u32 ranks = kRanks;
    u32 per_node = kRanks;
    bool near_audience = false;  // a field of BufferOptions, like the next
    u64 bytes_in_flight = 0;
    u64 lost = 0;  // ranks that leave before the first operation, as a bit set
};

struct Setup {
    std::string fabric;  // the route to other ranks, by name; "mixed": the last rank is not mapped
    bool arena;          // outputs are where peers can access them
    u64 region_bytes;    // small ones make chunks of few rows
    int regions;
    nic::Options nic;
    bool masks_ranks = false;
    Nodes nodes = {};
};

constexpr u32 kTopk = 2, kExperts = 6, kHidden = 40, kRowBytes = 2 * kHidden, kBlocks = 2;
constexpr u32 kTokens[kRanks] = {9, 0, 14};
constexpr u64 kSecond = 1'000'000'000;

// Small integers, so that sums are exact in any order.
inline u16 bf16(u32 integer) {
    const float value = static_cast<float>(integer);
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return static_cast<u16>(bits >> 16);
}
inline u16 element(u32 lap, u32 rank, u32 token, u32 h) { return bf16((lap * 5 + rank * 3 + token * 7 + h) % 29); }
inline u32 expert(u32 lap, u32 rank, u32 token, u32 k) { return (token * (lap + 2) + rank + k * 3 + k) % kExperts; }
inline bool goes(u32 lap, u32 rank, u32 token, u32 to) {
    for (u32 k = 0; k < kTopk; ++k) {
        if (expert(lap, rank, token, k) / (kExperts / kRanks) == to) return true;
    }
    return false;
}

// The location of one of a rank's signal words.
struct WordPlace {
    u32 generation, region, kind, source;

    const u64* in(const wire::HeapLayout& layout, const u8* near, const wire::FarWords& far_words) const {
        const u8* const in_near = near + layout.bank_offset(generation) + layout.word_in_bank(region, kind, source);
        return far_words.place(in_near, kind, source);
    }
};

// State that the ranks of a Buffer share besides memory.
struct World {
    explicit World(u32 ranks = kRanks) : heaps(ranks), near(ranks), far_words(ranks) {}

    std::vector<std::shared_ptr<host::Heap>> heaps;
    std::vector<std::shared_ptr<host::Heap>> near;  // null where all ranks are mapped: then it is in the heap
    std::vector<wire::FarWords> far_words;          // by rank, of the first generation
    wire::HeapLayout layout;
    std::atomic<u32> arrived{0};

    void meet(u32 phase) {
        ++arrived;
        cpu::Executor::get().wait([&] { return arrived.load() >= phase * heaps.size(); }, "the other ranks");
    }
};

// A launcher that forwards to another, except where a scenario overrides it.
class Forwarding : public host::Launcher {
  public:
    explicit Forwarding(std::shared_ptr<host::CpuLauncher> launcher) : launcher_(std::move(launcher)) {}

    uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps, size_t shared_bytes,
                    const void* args, size_t args_bytes) override {
        return launcher_->launch(kernel, shape, blocks, warps, shared_bytes, args, args_bytes);
    }
    bool finished(uint64_t serial) const override { return launcher_->finished(serial); }
    bool tracks_launches() const override { return launcher_->tracks_launches(); }
    unsigned warps() const override { return launcher_->warps(); }
    uint32_t copies_bytes() const override { return launcher_->copies_bytes(); }
    size_t max_shared_bytes() const override { return launcher_->max_shared_bytes(); }
    host::ChunkSizes chunks() const override { return launcher_->chunks(); }
    uint64_t streaming_threshold() const override { return launcher_->streaming_threshold(); }
    void wait(const std::function<bool()>& ready, const char* what) override { launcher_->wait(ready, what); }
    bool wait_for(const std::function<bool()>& ready, const char* what, uint64_t nanoseconds) override {
        return launcher_->wait_for(ready, what, nanoseconds);
    }
    bool wait_for_device(uint64_t nanoseconds) override { return launcher_->wait_for_device(nanoseconds); }

  protected:
    const std::shared_ptr<host::CpuLauncher> launcher_;
};

// As on a GPU: kernels tell the host when they have ended, and the launcher only knows whether all have.
class TellingKernels final : public Forwarding {
  public:
    using Forwarding::Forwarding;

    uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps, size_t shared_bytes,
                    const void* args, size_t args_bytes) override {
        return latest_ = Forwarding::launch(kernel, shape, blocks, warps, shared_bytes, args, args_bytes);
    }
    bool finished(uint64_t) const override { return latest_ == 0 || Forwarding::finished(latest_); }
    bool tracks_launches() const override { return false; }

  private:
    u64 latest_ = 0;
};

// Parts that a scenario may replace.
struct Parts {
    u64 timeout_ns = kSecond;
    unsigned blocks = kBlocks;
    std::unique_ptr<host::Memory> memory = std::make_unique<host::CpuMemory>();
    // The memory through which a host thread reports a failure that this rank's kernels have detected.
    std::function<std::unique_ptr<host::Memory>()> tellers = [] { return std::make_unique<host::CpuMemory>(); };
    // Default: one of each kind, by turns.
    std::function<std::shared_ptr<host::Launcher>(std::shared_ptr<host::CpuLauncher>)> launcher;
    // A peer's heap, as mapped by this rank.
    std::function<std::shared_ptr<host::Heap>(u32 peer, std::shared_ptr<host::Heap>)> mapped =
        [](u32, std::shared_ptr<host::Heap> heap) { return heap; };
};

// A rank's part of a Buffer. All ranks make theirs at the same time.
class Buffer {
  public:
    Buffer(World& world, u32 rank, const Setup& setup, Parts parts = {})
        : rank(rank), setup(setup), blocks(parts.blocks) {
        host::BufferOptions options{};
        options.rank = static_cast<int>(rank);
        options.ranks = static_cast<int>(setup.nodes.ranks);
        options.regions = setup.regions;
        options.region_bytes = setup.region_bytes;
        options.arena_bytes = setup.arena ? 1 << 16 : 0;
        options.timeout_ns = parts.timeout_ns;
        options.rank_key = rank;
        options.ranks_per_node = static_cast<int>(setup.nodes.per_node);
        options.near_audience = setup.nodes.near_audience;
        options.bytes_in_flight = setup.nodes.bytes_in_flight;
        options.calls = 2;
        options.call_words = host::normal::kCallWords;
        options.poison = true;
        options.masks_ranks = setup.masks_ranks;
        options.has_remote = setup.fabric != "peer";
        for (u32 peer = 0; peer < setup.nodes.ranks; ++peer) {
            options.routes.push_back(host::route_named(route(peer)));
        }
        const wire::HeapLayout layout = host::Runtime::heap_layout(options);
        const auto own = host::Heap::make_plain(layout.bytes());
        world.heaps[rank] = own;
        if (options.has_remote) {
            world.near[rank] = host::Heap::make_plain(layout.near_bytes());
            host::declare_near_part(*world.near[rank]);
            host::declare_host_memory(*own);
        }
        if (rank == 0) world.layout = layout;
        meet(world);
        std::vector<std::shared_ptr<host::Heap>> heaps;
        for (u32 peer = 0; peer < setup.nodes.ranks; ++peer) heaps.push_back(parts.mapped(peer, world.heaps[peer]));
        const host::NearParts near(heaps, near_parts(world));
        meet(world);  // all have read them, so they may be replaced
        host::NetworkPlace place{};
        place.rank = options.rank;
        for (const auto& heap : heaps) place.heaps.push_back(heap->base());
        place.layout = layout;
        place.kernels_on_cpu = place.in_process = true;
        for (uint8_t* heap : place.heaps) {
            if (setup.masks_ranks)
                place.masked.push_back(reinterpret_cast<wire::HeapHeader*>(heap)->masked.ranks.words);
        }
        place.nic = setup.nic;
        const auto make_networks = [place](host::Memory& memory, const std::vector<fabric::Route>& routes,
                                           u32 generation) {
            host::NetworkPlace here = place;
            here.memory = &memory;
            here.generation = generation;
            return host::Networks(here, routes);
        };
        const auto make_teller = [r = static_cast<int>(rank), memory = parts.tellers](const uint64_t* claimed,
                                                                                      host::Teller::Others others) {
            return std::make_unique<host::TellerAgent>(r, claimed, std::move(others), memory());
        };
        const auto make_control = [r = options.rank, heaps, near, layout, make_teller](host::Memory& memory) {
            std::vector<std::shared_ptr<uint8_t>> pages;
            for (const auto& heap : heaps) pages.emplace_back(heap, heap->base());
            return std::make_unique<host::SharedControl>(r, std::move(pages), near, layout, memory, make_teller);
        };
        stream = std::make_shared<host::CpuLauncher>(options.rank, own->base(), layout.regions_offset());
        std::shared_ptr<host::Launcher> launcher = stream;
        if (parts.launcher) {
            launcher = parts.launcher(stream);
        } else if (rank % 2 != 0) {
            launcher = std::make_shared<TellingKernels>(stream);
        }
        const auto make_warden = [make_control](host::WardenPost post) {
            return std::make_unique<host::WardenAgent>(std::move(post), std::make_unique<host::CpuMemory>(),
                                                       make_control);
        };
        runtime_ = std::make_unique<host::Runtime>(options, own, heaps, near, std::move(parts.memory), launcher,
                                                   make_control, make_warden, make_networks);
        world.far_words[rank] = runtime_->far_words();
        meet(world);
    }

    host::Runtime& runtime() { return *runtime_; }
    // One of this rank's signal words.
    const u64* word(u32 region, u32 kind, u32 source) {
        return WordPlace{runtime().generation(), region, kind, source}.in(
            host::Runtime::heap_layout(runtime().options()), runtime().near_parts().of(static_cast<int>(rank)),
            runtime().far_words());
    }
    // All ranks have reached this point.
    void meet(World& world) { world.meet(++phase_); }

    // One recovery (P16). `lost`: the ranks that have left. The ranks in turn give up their first attempt, wherever the
    // others are, and the others join the next one.
    void recover(const wire::RankMask& lost = {}) {
        expect(runtime().stop_all(kSecond), "kernels have not ended");
        const bool gives_up = rank == ++recoveries_ % kRanks;
        u64 next = attempt_ + 1;
        if (gives_up) {
            runtime().connect(lost, static_cast<u32>(next) + 1);
            runtime().meet(lost, next++, false, 0);
        }
        while (next != 0) {
            attempt_ = next;
            next = try_to_recover(lost);
        }
    }

    const u32 rank;
    const Setup& setup;
    const unsigned blocks;  // of each kernel
    std::shared_ptr<host::CpuLauncher> stream;

  private:
    // Returns the later attempt that another rank has begun, or 0.
    u64 try_to_recover(const wire::RankMask& lost) {
        const auto generation = static_cast<u32>(attempt_) + 1;
        runtime().connect(lost, generation);
        expect(runtime().wait_gone(lost, kSecond) == -1, "a rank has not left");
        host::Meeting meeting = runtime().meet(lost, attempt_, false, kSecond);
        if (meeting.result == host::Meeting::kLaterAttempt) return meeting.attempt;
        expect(meeting.result == host::Meeting::kMet, "first meeting");
        runtime().clear_words(generation);
        meeting = runtime().meet(lost, attempt_, true, kSecond);
        if (meeting.result == host::Meeting::kLaterAttempt) {
            runtime().abort_generation(generation, wire::kException);
            return meeting.attempt;
        }
        expect(meeting.result == host::Meeting::kMet, "second meeting");
        runtime().publish(generation, lost);
        return 0;
    }
    // GPUs that a proxy joins may be apart, so that a host does not reach the near parts of all ranks.
    std::vector<std::shared_ptr<host::Heap>> near_parts(const World& world) const {
        std::vector<std::shared_ptr<host::Heap>> parts;
        for (u32 peer = 0; setup.fabric != "peer" && peer < setup.nodes.ranks; ++peer) {
            const bool reached = setup.fabric != "proxy" || route(peer) == "peer";
            parts.push_back(reached ? world.near[peer] : nullptr);
        }
        return parts;
    }
    std::string route(u32 peer) const {
        const u32 per_node = setup.nodes.per_node;
        const bool near = per_node != setup.nodes.ranks && peer / per_node == rank / per_node;
        if (peer == rank || near) return "peer";
        if (setup.fabric != "mixed") return setup.fabric;
        return std::max(peer, rank) == kRanks - 1 ? "ibgda" : "peer";
    }

    u32 phase_ = 0;
    u32 recoveries_ = 0;
    u64 attempt_ = 0;  // the latest
    std::unique_ptr<host::Runtime> runtime_;
};

// Memory that kernels write, between guards that must not be written: in the arena, or the rank's own.
class Output {
  public:
    Output() = default;
    Output(host::Runtime& runtime, bool arena, u64 bytes) : runtime_(&runtime), bytes_(bytes) {
        const u64 whole = bytes + 2 * kGuard;
        if (arena) {
            offset_ = *runtime.arena()->allocate(whole);
            begin_ = runtime.arena()->address(*offset_);
        } else {
            own_.resize(whole + kGuard);
            begin_ = own_.data() + (kGuard - reinterpret_cast<uintptr_t>(own_.data()) % kGuard);
        }
        std::fill(begin_, begin_ + whole, kUnwritten);
    }
    u8* data() const { return begin_ + kGuard; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data());
    }
    u64 address() const { return bytes_ == 0 ? 0 : reinterpret_cast<u64>(data()); }
    void check(const std::string& what) const {
        for (u64 i = 0; i < kGuard; ++i) {
            expect(begin_[i] == kUnwritten && begin_[kGuard + bytes_ + i] == kUnwritten,
                   what + ": written beside the output");
        }
    }
    void release() {
        if (offset_) runtime_->arena()->release(*offset_);
    }

  private:
    static constexpr u64 kGuard = 256;
    static constexpr u8 kUnwritten = 0xee;
    host::Runtime* runtime_ = nullptr;
    u64 bytes_ = 0;
    std::optional<u64> offset_;
    std::vector<u8> own_;
    u8* begin_ = nullptr;
};

// A rank's tokens of one lap, and what it receives from the others.
class Batch {
  public:
    static constexpr u32 kHidden = protocol::kHidden;

    Batch(Buffer& buffer, u32 lap)
        : lap(lap),
          rank(buffer.rank),
          tokens(kTokens[rank]),
          sizes{tokens, kRowBytes, kTopk, kExperts},
          token_row(tokens * kRanks),
          row_token(kRanks * tokens),
          prefix(kRanks * kRanks),
          source_tokens(kRanks),
          buffer_(buffer),
          x_(buffer.runtime(), false, u64{tokens} * kRowBytes),
          idx_(tokens * kTopk),
          weights_(tokens * kTopk),
          per_rank_(kRanks),
          per_expert_(kExperts),
          in_rank_(tokens * kRanks),
          rows_to_rank_(kRanks) {
        for (u32 t = 0; t < tokens; ++t) {
            for (u32 h = 0; h < kHidden; ++h) x_.as<u16>()[t * kHidden + h] = element(lap, rank, t, h);
            for (u32 k = 0; k < kTopk; ++k) {
                idx_[t * kTopk + k] = expert(lap, rank, t, k);
                weights_[t * kTopk + k] = static_cast<float>(t + k + 1);
            }
        }
    }

    Plan plan() {
        return {token_row.data(), row_token.data(), prefix.data(), source_tokens.data(), rows_to_rank_.data()};
    }

    // `reroute`: changes the ids behind the layout's back.
    std::shared_ptr<host::Call> notify(bool finish_later = false,
                                       const std::function<void(std::vector<i64>&)>& reroute = {}) {
        host::Runtime& runtime = buffer_.runtime();
        runtime.wait_launch(host::normal::layout(runtime, sizes, address(idx_), address(per_rank_), 0,
                                                 address(per_expert_), address(in_rank_), buffer_.blocks));
        if (reroute) reroute(idx_);
        return host::normal::notify(runtime, sizes, address(in_rank_), address(per_expert_), address(idx_), plan(), {},
                                    0, finish_later, buffer_.blocks);
    }
    // After notify(): the counts, then the rows. Returns false if the call failed before there were any counts.
    bool dispatch(host::Call& call) {
        host::Runtime& runtime = buffer_.runtime();
        if (host::normal::lacks_counts(call)) host::normal::counts(call);
        runtime.wait_counts(call);
        if (__atomic_load_n(&call.outcome->counts_ready, __ATOMIC_ACQUIRE) == 0) return false;
        count = static_cast<u32>(host::normal::total_rows(call));
        check_counts(call.words.get());
        const bool arena = buffer_.setup.arena;
        recv_x = Output(runtime, arena, u64{count} * kRowBytes);
        recv_idx = Output(runtime, arena, count * kTopk * sizeof(i64));
        recv_weights = Output(runtime, arena, count * kTopk * sizeof(float));
        recv_src = Output(runtime, arena, count * sizeof(i32));
        host::normal::DispatchTensors tensors;
        tensors.x = x_.address();
        tensors.topk_idx = address(idx_);
        tensors.topk_weights = address(weights_);
        tensors.recv_x = recv_x.address();
        tensors.recv_topk_idx = recv_idx.address();
        tensors.recv_topk_weights = recv_weights.address();
        tensors.recv_src_idx = recv_src.address();
        host::normal::dispatch(runtime, call, sizes, tensors, plan(), count, false, buffer_.blocks);
        return true;
    }
    // The same rows again, into `rows`.
    std::shared_ptr<host::Call> cached_dispatch(const Output& rows) {
        const host::normal::Sizes cached{tokens, kRowBytes, 0, 0};
        host::normal::DispatchTensors tensors;
        tensors.x = x_.address();
        tensors.recv_x = rows.address();
        auto call = host::normal::open(buffer_.runtime(), wire::Kind::kCachedDispatch, cached, lap);
        host::normal::dispatch(buffer_.runtime(), *call, cached, tensors, plan(), count, true, buffer_.blocks);
        return call;
    }
    // Over `through`, which belongs to this rank too.
    std::shared_ptr<host::Call> combine(Buffer& through, const Output& rows, const Output& sums) {
        host::normal::CombineTensors back;
        back.x = rows.address();
        back.combined_x = sums.address();
        back.src_idx = recv_src.address();
        const host::normal::Sizes combined{tokens, kRowBytes, 0, 0};
        auto call = host::normal::open(through.runtime(), wire::Kind::kCombine, combined, lap);
        host::normal::combine(through.runtime(), *call, combined, back, plan(), count, true, through.blocks);
        return call;
    }
    Output make_sums() { return {buffer_.runtime(), false, u64{tokens} * kRowBytes}; }

    // The source ranks and tokens of the received rows.
    struct Row {
        u32 source, token;
    };
    std::vector<Row> rows() const {
        std::vector<Row> rows;
        for (u32 source = 0; source < kRanks; ++source) {
            for (u32 t = 0; t < kTokens[source]; ++t) {
                if (goes(lap, source, t, rank)) rows.push_back({source, t});
            }
        }
        return rows;
    }

    void check_counts(const i32* rows_per_expert) const {
        for (u32 e = 0; e < kExperts / kRanks; ++e) {
            i32 rows = 0;
            for (u32 source = 0; source < kRanks; ++source) {
                for (u32 i = 0; i < kTokens[source] * kTopk; ++i) {
                    rows += expert(lap, source, i / kTopk, i % kTopk) == rank * (kExperts / kRanks) + e;
                }
            }
            expect(rows_per_expert[e] == rows, whose() + "rows of expert " + std::to_string(e));
        }
    }
    void check_dispatch() const {
        const std::vector<Row> expected = rows();
        expect(count == expected.size(),
               whose() + std::to_string(count) + " rows, expected " + std::to_string(expected.size()));
        check_rows(recv_x);
        for (u32 row = 0; row < count; ++row) {
            const auto [source, t] = expected[row];
            const std::string what = whose() + "row " + std::to_string(row) + ": ";
            expect(recv_src.as<i32>()[row] == static_cast<i32>(t), what + "index at the source");
            for (u32 k = 0; k < kTopk; ++k) {
                const i64 local = static_cast<i64>(expert(lap, source, t, k)) - rank * (kExperts / kRanks);
                const bool here = local >= 0 && local < kExperts / kRanks;
                expect(recv_idx.as<i64>()[row * kTopk + k] == (here ? local : -1), what + "expert");
                expect(recv_weights.as<float>()[row * kTopk + k] == (here ? static_cast<float>(t + k + 1) : 0.0f),
                       what + "weight");
            }
        }
    }
    void check_rows(const Output& x) const {
        const std::vector<Row> expected = rows();
        for (u32 row = 0; row < count; ++row) {
            for (u32 h = 0; h < kHidden; ++h) {
                expect(x.as<u16>()[row * kHidden + h] == element(lap, expected[row].source, expected[row].token, h),
                       whose() + "row " + std::to_string(row) + ": x");
            }
        }
    }
    // `value(holder, token, h)`: an element of the row that `holder` returns for this rank's token.
    template <class Value>
    void check_sums(const Output& sums, Value value) const {
        for (u32 t = 0; t < tokens; ++t) {
            for (u32 h = 0; h < kHidden; ++h) {
                u32 sum = 0;
                for (u32 to = 0; to < kRanks; ++to) sum += goes(lap, rank, t, to) ? value(to, t, h) : 0;
                expect(sums.as<u16>()[t * kHidden + h] == bf16(sum),
                       whose() + "sum of token " + std::to_string(t) + " is wrong");
            }
        }
    }
    // For rows returned unchanged.
    void check_echo(const Output& sums) const {
        check_sums(sums, [&](u32, u32 token, u32 h) { return (lap * 5 + rank * 3 + token * 7 + h) % 29; });
    }
    void check_guards() const {
        for (const Output* output : {&recv_x, &recv_idx, &recv_weights, &recv_src}) output->check(whose());
    }
    // Their owner overwrites these as soon as the calls have ended.
    void end() {
        check_guards();
        std::fill(x_.as<u16>(), x_.as<u16>() + tokens * kHidden, u16{0xffff});
        for (Output* output : {&recv_x, &recv_idx, &recv_weights, &recv_src}) output->release();
    }
    std::string whose() const { return "rank " + std::to_string(rank) + ": "; }

    const u32 lap, rank, tokens;
    const host::normal::Sizes sizes;
    std::vector<i32> token_row, row_token, prefix, source_tokens;
    u32 count = 0;
    Output recv_x, recv_idx, recv_weights, recv_src;

  private:
    template <class T>
    static u64 address(std::vector<T>& vector) {
        return reinterpret_cast<u64>(vector.data());
    }

    Buffer& buffer_;
    Output x_;
    std::vector<i64> idx_;
    std::vector<float> weights_;
    std::vector<i32> per_rank_, per_expert_;
    std::vector<u8> in_rank_;
    std::vector<i32> rows_to_rank_;
};

// Waits for a call that must succeed.
inline void end_well(Buffer& buffer, const std::shared_ptr<host::Call>& call) {
    buffer.runtime().wait(*call);
    const wire::Failure failure = call->failure();
    expect(failure.mark == 0, std::string("failed: ") + wire::phase_name(static_cast<wire::Phase>(failure.phase)));
    buffer.runtime().retire(call);
}

}  // namespace protocol
