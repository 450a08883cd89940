#include "near_part.h"

#include <vector>

#include "../program.h"
#include "draw.h"
#include "host/heap/host_word.h"
#include "host/heap/near_parts.h"
#include "kernels/common/operation.h"
#include "sim/host/memory.h"
#include "sim/host/teller_agent.h"

namespace protocol::near_part {

using namespace deep_ep;
using device::Scope;
using planted::expect;

constexpr u32 kWarps = 2, kLooks = 8;

struct Args {
    CallArgs call;
    u32* passed;  // how many last looks have found nothing
};

DEEP_EP_KERNEL void look(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    DEEP_EP_SHARED(BlockState, block);
    Operation op(a.call, &block);
    op.enter();
    for (u32 i = 0; i < kLooks; ++i) {
        const bool clear = device::lane() != 0 || op.looks_clear();
        if (device::lane() == 0 && clear) device::add_relaxed<Scope::kDevice>(a.passed, 1u);
    }
}

// The only rank of a Buffer. Its heap is in host memory, and its near part is not.
struct Rank {
    std::vector<std::shared_ptr<host::Heap>> heaps = {host::Heap::make_plain(wire::kPage)};
    std::vector<std::shared_ptr<host::Heap>> memory = {host::Heap::make_plain(wire::kPage)};
    host::NearParts near{heaps, memory};

    Rank() { host::declare_host_memory(*heaps[0]); }
    u64* own() { return abort_word(near.of(0)); }
    u64* in_header() { return abort_word(heaps[0]->base()); }

    static u64* abort_word(u8* part) { return &reinterpret_cast<wire::HeapHeader*>(part)->abort_of(kGeneration); }

    static constexpr u32 kGeneration = 3;
};

u64 word(u32 generation) { return wire::abort_word(generation, wire::kException, 1, -1); }

// A host stores the abort word while warps look: it stays, and later looks find it.
void run_looks(uint64_t seed) {
    Rank rank;
    Context context{};
    Ticket ticket{};
    wire::Outcome outcome{};
    u64 failures = 0, claimed = 0;
    u32 passed = 0;
    context.peers.local = rank.heaps[0]->base();
    context.peers.near = rank.near.of(0);
    context.peers.ranks = 1;
    context.peers.heap = {1, 1, 64, 0};
    context.sequence = Sequence{Rank::kGeneration, 0, 0}.word();
    context.failures = &failures;
    context.claimed = &claimed;
    context.mask.words[0] = 1;
    const Args args{{&context, &ticket, &outcome, 1'000'000'000, 1, nullptr}, &passed};
    const u32 moment = Draw(seed).below(kWarps * kLooks);
    planted::run_world(1, seed, [&](int) {
        cpu::Executor& executor = cpu::Executor::get();
        const int host = executor.add_agent(0, "a host", [&] {
            cpu::wait_until([&] { return device::load_relaxed<Scope::kSystem>(&passed) >= moment; }, "some looks");
            host::CpuMemory().store_words({host::host_word(*rank.own())}, word(Rank::kGeneration));
            cpu::wait_until([] { return false; }, "nothing more");
        });
        planted::launch("look", 0, 1, kWarps, look, args);
        executor.synchronize(0, 0);
        executor.remove_agent(host);
    });
    expect(*rank.own() == word(Rank::kGeneration), "the abort word is lost");
}

// What another host stores in the header reaches this rank's kernels, unless it is of an older generation.
void run_telling(uint64_t seed) {
    Rank rank;
    u64 claimed = 0;
    planted::run_world(1, seed, [&](int) {
        cpu::Executor& executor = cpu::Executor::get();
        const host::TellerAgent teller(
            0, host::host_word(claimed),
            {0, Rank::kGeneration, {}, nullptr, host::host_word(*rank.in_header()), host::host_word(*rank.own())},
            std::make_unique<host::CpuMemory>());
        const auto seen = [&] { return host::CpuMemory().load_word(host::host_word(*rank.own())); };
        const auto tell = [&](u32 generation) {
            host::CpuMemory().store_words({host::host_word(*rank.in_header())}, word(generation));
            const u64 until = executor.now_ns() + 1'000'000'000;
            executor.wait([&] { return seen() == word(generation); }, "the word", until);
        };
        tell(Rank::kGeneration - wire::kBanks);
        expect(seen() == 0, "a word of an older generation is passed on");
        tell(Rank::kGeneration);
        expect(seen() == word(Rank::kGeneration), "what a host tells is not passed on");
        tell(Rank::kGeneration - wire::kBanks);
        expect(seen() == word(Rank::kGeneration), "a word of an older generation erases a newer one");
    });
}

void run(uint64_t seed) {
    for (uint64_t i = 0; i < 8; ++i) run_looks(8 * seed + i);
    run_telling(seed);
}

}  // namespace protocol::near_part
