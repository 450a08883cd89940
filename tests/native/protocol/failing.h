// Operations that are queued after one that fails, with user kernels between them which overwrite the published rows:
// whatever fails, and however ranks learn of it, a call that ends without a failure has the right sums (P12, P14, P15).
#pragma once

#include <algorithm>

#include "draw.h"
#include "ranks.h"
#include "slow_memory.h"

namespace protocol::failing {

constexpr u32 kCombines = 3, kWorlds = 24, kOrderedWorlds = 72, kMaxRanks = 4;
constexpr u64 kForever = 1000 * kSecond;

struct Kind {
    // ThreadSanitizer must judge the order of rows that are read and overwritten. Therefore a user kernel after a
    // failure waits until the same operation has ended everywhere, and writes only rows whose owner's operation
    // succeeded; it learns that without any ordering between the two.
    bool ordered;
    // A host thread overwrites a call's rows as soon as its record has a reason, while its kernel still runs.
    bool watched;
    u32 aborter;     // the rank whose host may report a failure
    u32 delays = 1;  // factor for the delays of its messages to the others
};

// A rank's rows of version `version`, as its user kernels write them.
inline u32 value(u32 version, u32 holder, u32 source, u32 token, u32 h) {
    return (version * 31 + holder * 7 + source * 3 + token * 5 + h) % 61;
}
constexpr u16 kGarbage = 0x7fc1;  // NaN, which makes every sum with it NaN

// The minimum that combine needs.
class FewWarps final : public Forwarding {
  public:
    using Forwarding::Forwarding;
    unsigned warps() const override { return 2; }
};

// The outcome of each combine on each rank. 0: not ended yet.
struct Ends {
    enum : u32 { kWell = 1, kFailed = 2 };
    u32 of[kCombines][kMaxRanks] = {};
};

// The rows that a rank has received.
struct Rows {
    struct Row {
        u32 source, token;
    };
    u16* x;
    const Row* of;
    u32 count, hidden;
};
template <class Batch>
std::vector<Rows::Row> rows_of(const Batch& batch) {
    std::vector<Rows::Row> rows;
    for (const auto& row : batch.rows()) rows.push_back({row.source, row.token});
    return rows;
}

struct UserArgs {
    Rows rows;
    u32 version;  // to be written
    u32 rank, ranks;
    const wire::Failure* failure;  // of the preceding combine
    u32 generation;
    u32* ends;  // of that combine, by rank
    bool ordered;
};

DEEP_EP_KERNEL void write_over(const void* args) {
    const auto& a = *static_cast<const UserArgs*>(args);
    const u64 mark = device::load_relaxed<Scope::kSystem>(&a.failure->mark);
    const bool well = wire::mark_generation(mark) != a.generation;
    if (threadIdx.x == 0) {
        device::store_relaxed<Scope::kSystem>(&a.ends[a.rank], u32{well ? Ends::kWell : Ends::kFailed});
    }
    u32 ends[kMaxRanks] = {};
    if (!well && a.ordered) {
        // Relaxed: so that nothing but the protocol orders the rows.
        for (u32 r = 0; r < a.ranks; ++r) {
            device::spin_until([&] { return (ends[r] = device::load_relaxed<Scope::kSystem>(&a.ends[r])) != 0; }, ~0ull,
                               nullptr);
        }
    }
    for (u32 row = threadIdx.x; row < a.rows.count; row += blockDim.x) {
        const auto [source, token] = a.rows.of[row];
        if (!well && a.ordered && ends[source] != Ends::kWell) continue;
        for (u32 h = 0; h < a.rows.hidden; ++h) {
            a.rows.x[row * a.rows.hidden + h] = well ? bf16(value(a.version, a.rank, source, token, h)) : kGarbage;
        }
        // Where another thread may come first.
        device::load_relaxed<Scope::kSystem>(&a.failure->mark);
    }
}

// Queues it after a call.
inline void launch_write_over(Buffer& buffer, const Rows& rows, u32 version, const host::Call& behind, u32* ends,
                              bool ordered) {
    const UserArgs args{
        rows, version, buffer.rank, buffer.setup.nodes.ranks, &behind.outcome->failure, behind.generation,
        ends, ordered};
    const int rank = static_cast<int>(buffer.rank), stream = buffer.stream->stream();
    cpu::Executor::get().launch(
        {"write over", rank, stream, 1, 2 * device::kWarpSize, 0, write_over, &args, sizeof(args)});
}

// The failures of a run.
struct Plan {
    u64 timeout_ns[kMaxRanks];
    u32 late;                                                       // the late rank
    u32 in_time;                                                    // number of combines that it starts in time
    u64 late_ns;                                                    // its delay; 0: no rank is late
    bool aborts;                                                    // whether kind.aborter aborts
    enum Moment : u32 { kAtOnce, kRead, kEnded, kMoments } moment;  // when its stores may arrive, see due()
    u32 reader;                                                     // kRead: this rank has read its rows
    u32 in;                                                         // index of the combine for kRead and kEnded
    Delays delays;                                                  // of the hosts' stores

    static Plan of(u64 seed, const Nodes& nodes) {
        const u32 ranks = nodes.ranks;
        Draw draw(seed);
        Plan plan{};
        const u32 first = draw.below(ranks);
        for (u32 r = 0; r < ranks; ++r) plan.timeout_ns[r] = ((r + first) % ranks + 1) * 10 * kSecond;
        const u32 what = draw.below(4);
        plan.aborts = what != 0;
        plan.late = draw.below(ranks);
        if (what < 2) {
            u64 shortest = kForever;
            for (u32 r = 0; r < ranks; ++r) {
                if (r != plan.late) shortest = std::min(shortest, plan.timeout_ns[r]);
            }
            plan.late_ns = draw.below(2) == 0 ? shortest : shortest * 3 / 2;
        }
        plan.in_time = draw.below(kCombines);
        plan.moment = static_cast<Moment>(draw.below(kMoments));
        plan.reader = 2 * draw.below(2) % nodes.per_node;  // those with tokens, of rank 1's node
        plan.in = draw.below(kCombines);
        plan.delays = {1u << draw.below(8), 1u << (4 + draw.below(8))};
        return plan;
    }
};

// A host thread that acts on a call's record at once. By then every rank has the abort word.
class Watcher {
  public:
    Watcher(Buffer& buffer, const std::vector<std::shared_ptr<host::Call>>& calls, Rows rows)
        : runtime_(buffer.runtime()), calls_(calls), rows_(rows) {
        const int rank = static_cast<int>(buffer.rank);
        agent_ = cpu::Executor::get().add_agent(rank, "watcher", [this] { serve(); });
    }
    ~Watcher() { cpu::Executor::get().remove_agent(agent_); }

    bool too_early() const { return too_early_; }

  private:
    void serve() {
        const auto failed = [this] {
            return std::any_of(calls_.begin(), calls_.end(), [](const auto& call) { return call->reason() != 0; });
        };
        cpu::wait_until(failed, "a failure");
        for (u32 r = 0; r < kRanks; ++r) {
            const u64 word = __atomic_load_n(abort_word(r), __ATOMIC_RELAXED);
            if (wire::abort_generation(word) != calls_[0]->generation) too_early_ = true;
        }
        std::fill(rows_.x, rows_.x + rows_.count * rows_.hidden, kGarbage);
        cpu::wait_until([] { return false; }, "nothing more");
    }

    const u64* abort_word(u32 rank) const {
        auto* const near = reinterpret_cast<wire::HeapHeader*>(runtime_.near_parts().of(static_cast<int>(rank)));
        return &near->abort_of(runtime_.generation());
    }

    const host::Runtime& runtime_;
    const std::vector<std::shared_ptr<host::Call>> calls_;
    const Rows rows_;
    bool too_early_ = false;
    int agent_ = -1;
};

// Whether the moment has come. Relaxed, as in write_over().
inline bool due(const Plan& plan, const World& world, const Ends& ends) {
    const size_t ranks = world.heaps.size();
    const auto of = ends.of[plan.in];
    const auto over = [](const u32& end) { return __atomic_load_n(&end, __ATOMIC_RELAXED) != 0; };
    // Where rows go in chunks, none are read in place.
    if (plan.moment == Plan::kAtOnce || std::any_of(of, of + ranks, over)) return true;
    if (plan.moment == Plan::kEnded) return false;
    // The dispatch was the first operation; each use of a region adds one unit.
    const u64 operation = plan.in + 1, regions = world.layout.regions;
    const WordPlace place{1, static_cast<u32>(operation % regions), wire::kRead, plan.reader};
    const auto& near = world.near[1] ? world.near[1] : world.heaps[1];
    const u64* const word = place.in(world.layout, near->base(), world.far_words[1]);
    const u64 combines = operation / regions + (operation % regions != 0);
    return __atomic_load_n(word, __ATOMIC_RELAXED) >= combines * wire::kUnit;
}

struct Result {
    u32 failed = 0, well = 0, mixed = 0;  // calls, and those that failed on one rank and succeeded on another
};

// Batch: a rank's tokens, as in ranks.h.
template <class Batch>
Result run_world(uint64_t seed, const Setup& setup, const Kind& kind) {
    const u32 ranks = setup.nodes.ranks;
    Plan plan = Plan::of(seed, setup.nodes);
    plan.delays.later *= kind.delays;
    World world(ranks);
    Ends ends;
    u64 began[kMaxRanks] = {}, ended[kMaxRanks] = {};
    planted::run_world(static_cast<int>(ranks), seed, [&](int r) {
        const u32 rank = static_cast<u32>(r);
        cpu::Executor& executor = cpu::Executor::get();
        Parts parts;
        parts.timeout_ns = plan.timeout_ns[rank];
        parts.memory = std::make_unique<SlowMemory>(r, plan.delays, [&] { return due(plan, world, ends); });
        parts.tellers = [most = plan.delays.later] { return std::make_unique<LateMemory>(most); };
        Buffer buffer(world, rank, setup, std::move(parts));
        Batch batch(buffer, 0);
        auto call = batch.notify();
        batch.dispatch(*call);
        end_well(buffer, call);
        batch.check_dispatch();

        const std::vector<Rows::Row> of = rows_of(batch);
        const Rows rows{batch.recv_x.template as<u16>(), of.data(), static_cast<u32>(of.size()), Batch::kHidden};
        for (u32 row = 0; row < rows.count; ++row) {
            for (u32 h = 0; h < rows.hidden; ++h) {
                rows.x[row * rows.hidden + h] = bf16(value(1, rank, of[row].source, of[row].token, h));
            }
        }
        buffer.meet(world);
        began[rank] = executor.now_ns();
        std::vector<std::shared_ptr<host::Call>> calls;
        std::vector<Output> sums;
        for (u32 i = 0; i < kCombines; ++i) {
            if (rank == plan.late && i == plan.in_time && plan.late_ns != 0) {
                executor.wait([] { return false; }, "being late", began[rank] + plan.late_ns);
            }
            sums.push_back(batch.make_sums());
            calls.push_back(batch.combine(buffer, batch.recv_x, sums[i]));
            launch_write_over(buffer, rows, i + 2, *calls[i], ends.of[i], kind.ordered);
        }
        {
            std::optional<Watcher> watcher;
            if (kind.watched) watcher.emplace(buffer, calls, rows);
            if (plan.aborts && rank == kind.aborter) {
                buffer.runtime().abort(wire::kException);
                // Its caller continues.
                if (!kind.ordered) std::fill(rows.x, rows.x + rows.count * rows.hidden, kGarbage);
            }
            executor.synchronize(r, buffer.stream->stream());
            ended[rank] = executor.now_ns();
            buffer.meet(world);
            expect(!watcher || !watcher->too_early(), batch.whose() + "a record has a reason before all ranks know");
        }
        for (u32 i = 0; i < kCombines; ++i) {
            sums[i].check(batch.whose());
            if (calls[i]->reason() != 0) continue;
            batch.check_sums(sums[i],
                             [&](u32 holder, u32 token, u32 h) { return value(i + 1, holder, rank, token, h); });
        }
        batch.check_guards();
        buffer.meet(world);
    });
    Result result;
    for (u32 i = 0; i < kCombines; ++i) {
        const u32 well = static_cast<u32>(std::count(ends.of[i], ends.of[i] + ranks, u32{Ends::kWell}));
        result.well += well;
        result.failed += ranks - well;
        result.mixed += well != 0 && well != ranks;
    }
    // No rank waits for its own timeout: the first rank that times out notifies the others.
    const u64 begin = *std::min_element(began, began + ranks), end = *std::max_element(ended, ended + ranks);
    expect(end - begin <= plan.late_ns, "the last rank ended after " + std::to_string(end - begin) +
                                            " ns, one was late by " + std::to_string(plan.late_ns));
    return result;
}

template <class Batch>
void run(uint64_t seed, const Setup& setup, const Kind& kind) {
    Result all;
    const u32 worlds = kind.ordered ? kOrderedWorlds : kWorlds;
    for (u32 i = 0; i < worlds; ++i) {
        const Result result = run_world<Batch>(seed * worlds + i, setup, kind);
        all.failed += result.failed;
        all.well += result.well;
        all.mixed += result.mixed;
    }
    std::printf("%u combines ended well, %u failed, %u did both\n", all.well, all.failed, all.mixed);
}

}  // namespace protocol::failing
