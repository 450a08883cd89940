#include "barriers.h"

#include <string>
#include <vector>

#include "../program.h"
#include "draw.h"
#include "kernels/common/turns.h"

namespace protocol::barriers {

using namespace deep_ep;
using namespace deep_ep::device;
using planted::expect;

constexpr u32 kRounds = 6, kWarps = 3, kThreads = kWarps * kWarpSize, kNone = ~0u;
enum Kind : u32 { kWarp, kBlock, kLastBlock, kKinds };

struct Args {
    CallArgs call;
    u32 gives_up;  // the thread
    u32 before;    // index of the barrier, over all kinds
    u32* answers;  // [rounds, kinds, threads]
};

// Every thread records the answer of each barrier and continues even if told to leave, so that all answers are seen.
DEEP_EP_KERNEL void sync(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    DEEP_EP_SHARED(BlockState, block);
    Operation op(a.call, &block);
    op.enter();
    for (u32 m = 0; m < kRounds; ++m) {
        const auto note = [&](Kind kind, auto sync) {
            // Other threads may still be leaving the previous barrier.
            const u32 now = m * kKinds + kind;
            if (threadIdx.x == a.gives_up && now == a.before) op.fail(wire::kMismatch, Phase::kNone, -1, 0, 0);
            a.answers[now * kThreads + threadIdx.x] = sync();
        };
        note(kWarp, [&] { return device::warp() != 0 || op.sync_warp(); });
        note(kBlock, [&] { return op.sync_block(); });
        note(kLastBlock, [&] { return op.last_block(kStored); });
        __syncthreads();
        if (threadIdx.x == 0) a.call.ticket->blocks_arrived[kStored] = 0;
    }
}

bool joins(u32 barrier, u32 thread) { return barrier % kKinds != kWarp || thread < kWarpSize; }

// Whether threads that join a barrier may or may not find that a thread outside it has given up: the two are ordered
// only by the barriers that the thread does join.
bool open_to_both(u32 barrier, u32 gives_up, u32 before) {
    if (gives_up == kNone || joins(barrier, gives_up)) return false;
    u32 next = before;
    while (!joins(next, gives_up)) ++next;
    u32 latest = before;  // after the latest one it has joined
    while (latest > 0 && !joins(latest - 1, gives_up)) --latest;
    return latest <= barrier && barrier < next;
}

struct EntryArgs {
    CallArgs call;
    u32* entered;  // [threads]
};

DEEP_EP_KERNEL void enter(const void* args) {
    const EntryArgs& a = *static_cast<const EntryArgs*>(args);
    DEEP_EP_SHARED(BlockState, block);
    Operation op(a.call, &block);
    a.entered[threadIdx.x] = op.enter_first(wire::Kind::kLowLatencyDispatch, 5, 1);
}

// The only rank of a Buffer, which excludes itself, so that it notifies no rank.
struct Alone {
    std::vector<u64> heap = std::vector<u64>(4096, 0);
    u64 failures = 0, claimed = 0;
    Context context{};
    Ticket ticket{};
    wire::Outcome outcome{};

    Alone() {
        context.peers.local = reinterpret_cast<u8*>(heap.data());
        context.peers.near = context.peers.local;
        context.peers.ranks = 1;
        context.peers.heap = {1, 1, 64, 0};
        context.sequence = Sequence{1, 0, 0}.word();
        context.failures = &failures;
        context.claimed = &claimed;
        context.mask.words[0] = 1;
    }
    wire::HeapHeader& header() { return *reinterpret_cast<wire::HeapHeader*>(heap.data()); }
    CallArgs call() { return {&context, &ticket, &outcome, 1'000'000'000, 1, nullptr}; }
};

// A kernel that leaves at its entry is not an operation: other ranks' hosts must not find it announced as one.
void run_entry(uint64_t seed, bool aborted) {
    Alone alone;
    if (aborted) alone.header().abort_of(1) = wire::abort_word(1, wire::kTimeout, 0, -1);
    std::vector<u32> entered(kThreads, 2);
    const EntryArgs args{alone.call(), entered.data()};
    planted::run_world(1, seed, [&](int) {
        planted::launch("enter", 0, 1, kWarps, enter, args);
        cpu::Executor::get().synchronize(0, 0);
    });
    for (const u32 thread : entered) expect(thread == !aborted, "a thread entered although aborted, or did not enter");
    const u64 wanted = aborted ? 0 : wire::announcement(0, wire::Kind::kLowLatencyDispatch, 5);
    expect(alone.header().announcement == wanted, "an announcement of " + std::to_string(alone.header().announcement));
}

// A step that waits for two conditions, the first of which becomes true.
struct TwoHoldUps {
    static constexpr i32 kFirst = 3, kSecond = 5;
    const Operation& op;

    u32 entries() const { return 1; }
    u32 steps(u32) const { return 1; }
    Pending blocked(u32, u32) const {
        const Pending first = Pending::of(op, Phase::kChunk, kFirst, wire::kChunk, 0, 1);
        if (!first.looks_over()) return first;
        const Pending second = Pending::of(op, Phase::kNext, kSecond, wire::kNext, 0, 1);
        return second.looks_over() ? Pending::none() : second;
    }
    bool open(u32, u32) const { return true; }
    void step(u32, u32) const {}
    void close(u32, u32) const {}
};

DEEP_EP_KERNEL void poll(const void* args) {
    const CallArgs& call = *static_cast<const CallArgs*>(args);
    DEEP_EP_SHARED(BlockState, block);
    DEEP_EP_SHARED(u32[Turns::words(1)], words);
    Operation op(call, &block);
    op.enter();
    const TwoHoldUps work{op};
    take_turns(op, work, Turns::in(words));
}

// A block that gives up names the condition that last held it up, not the one when it began to wait.
void run_polling(uint64_t seed) {
    Alone alone;
    auto* const bytes = reinterpret_cast<u8*>(alone.heap.data());
    const wire::HeapLayout& layout = alone.context.peers.heap;
    u64* const first = reinterpret_cast<u64*>(bytes + layout.bank_offset(1) + layout.word_in_bank(0, wire::kChunk, 0));
    std::vector<u64> base(layout.words(), 0);
    alone.context.base = base.data();
    planted::run_world(1, seed, [&](int) {
        cpu::Executor& executor = cpu::Executor::get();
        const u64 half = executor.now_ns() + alone.call().timeout_ns / 2;
        const int peer = executor.add_agent(0, "a peer", [&] {
            cpu::wait_until([] { return false; }, "half of the time", half);
            store_release<Scope::kSystem>(first, wire::kUnit);
            cpu::wait_until([] { return false; }, "nothing more");
        });
        const CallArgs args = alone.call();
        executor.launch({"poll", 0, 0, 1, kWarpSize, 0, poll, &args, sizeof(args)});
        executor.synchronize(0, 0);
        executor.remove_agent(peer);
    });
    const wire::Failure& failure = alone.outcome.failure;
    expect(
        failure.peer == TwoHoldUps::kSecond && failure.phase == static_cast<u32>(Phase::kNext),
        "it names rank " + std::to_string(failure.peer) + ", " + wire::phase_name(static_cast<Phase>(failure.phase)));
}

struct OutlastArgs {
    CallArgs call;
    u64* word;
    bool told;  // to give up, before it waits
    u32* came;
};

DEEP_EP_KERNEL void outlast(const void* args) {
    const OutlastArgs& a = *static_cast<const OutlastArgs*>(args);
    DEEP_EP_SHARED(BlockState, block);
    Operation op(a.call, &block);
    op.enter();
    if (a.told) op.fail(wire::kMismatch, Phase::kNone, -1, 0, 0);
    *a.came = op.outlast(Phase::kPost, 3, a.word, 1, [&] { return load_acquire<Scope::kSystem>(a.word) == 1; });
}

// A step that must not be left half done is waited for even by an operation that has been given up, but not forever.
void run_outlasting(uint64_t seed, bool told, bool comes) {
    Alone alone;
    u64 word = 0;
    u32 came = 2;
    const OutlastArgs args{alone.call(), &word, told, &came};
    planted::run_world(1, seed, [&](int) {
        cpu::Executor& executor = cpu::Executor::get();
        const u64 half = executor.now_ns() + alone.call().timeout_ns / 2;
        const int other = executor.add_agent(0, "another thread", [&] {
            cpu::wait_until([] { return false; }, "half of the time", half);
            if (comes) store_release<Scope::kSystem>(&word, 1);
            cpu::wait_until([] { return false; }, "nothing more");
        });
        executor.launch({"outlast", 0, 0, 1, 1, 0, outlast, &args, sizeof(args)});
        executor.synchronize(0, 0);
        executor.remove_agent(other);
    });
    expect(came == comes, "a thread got the wrong result of its wait");
    const wire::Reason reason = told ? wire::kMismatch : comes ? wire::kNoFailure : wire::kTimeout;
    expect(alone.outcome.failure.mark == (reason == wire::kNoFailure ? 0 : wire::failure_mark(1, reason)),
           "another reason");
}

// Where ranks may be masked: the others have continued without this one, have notified it, and then have sent `free`.
// Therefore it must leave, whenever its threads check either.
void run_masked_entry(uint64_t seed) {
    Alone alone;
    std::vector<u64> suspects(1, 0);
    alone.context.suspects = suspects.data();
    alone.context.mask.words[0] = 0;  // it waits for its own `free`
    alone.context.sequence = Sequence{1, 1, 0}.word();
    auto* const bytes = reinterpret_cast<u8*>(alone.heap.data());
    const wire::HeapLayout& layout = alone.context.peers.heap;
    u64* const free = reinterpret_cast<u64*>(bytes + layout.bank_offset(1) + layout.word_in_bank(0, wire::kFree, 0));
    std::vector<u32> entered(kThreads, 2);
    const EntryArgs args{alone.call(), entered.data()};
    planted::run_world(1, seed, [&](int) {
        cpu::Executor& executor = cpu::Executor::get();
        const int others = executor.add_agent(0, "the others", [&] {
            u64* const announcement = &alone.header().announcement;
            cpu::wait_until([&] { return load_relaxed<Scope::kSystem>(announcement) != 0; }, "the rank has looked");
            exchange_acquire<Scope::kSystem>(&alone.header().abort_of(1), wire::abort_word(1, wire::kMasked, 0, 0));
            store_release<Scope::kSystem>(free, wire::kUnit);
            cpu::wait_until([] { return false; }, "nothing more");
        });
        planted::launch("enter", 0, 1, kWarps, enter, args);
        executor.synchronize(0, 0);
        executor.remove_agent(others);
    });
    for (const u32 thread : entered) expect(thread == 0, "a thread of a rank that is masked entered");
}

void run(uint64_t seed) {
    run_entry(seed, false);
    run_entry(seed, true);
    run_polling(seed);
    for (const bool told : {false, true}) {
        for (const bool comes : {false, true}) run_outlasting(seed, told, comes);
    }
    for (u32 i = 0; i < 16; ++i) run_masked_entry(16 * seed + i);
    Draw draw(seed);
    for (u32 trial = 0; trial < 2 * kThreads; ++trial) {
        const u32 gives_up = trial % 3 == 0 ? kNone : draw.below(kThreads), before = draw.below(kRounds * kKinds);
        Alone alone;
        std::vector<u32> answers(kRounds * kKinds * kThreads, 1);
        const Args args{alone.call(), gives_up, before, answers.data()};
        planted::run_world(1, seed + trial, [&](int) {
            planted::launch("sync", 0, 1, kWarps, sync, args);
            cpu::Executor::get().synchronize(0, 0);
        });
        for (u32 i = 0; i < answers.size(); ++i) {
            const u32 barrier = i / kThreads, thread = i % kThreads;
            if (!joins(barrier, thread)) continue;
            const u32 wanted =
                open_to_both(barrier, gives_up, before) ? answers[i - thread] : gives_up == kNone || barrier < before;
            expect(answers[i] == wanted, "thread " + std::to_string(thread) + " leaves barrier " +
                                             std::to_string(barrier) + " with " + std::to_string(answers[i]));
        }
    }
}

}  // namespace protocol::barriers
