// Dispatch and combine through a Runtime, as Python makes them, on ranks that are threads: every value is checked.
#pragma once

#include <atomic>
#include <memory>

#include "../program.h"
#include "host/cpu/launcher.h"
#include "host/cpu/memory.h"
#include "host/cpu/nic_agents.h"
#include "host/cpu/teller_agent.h"
#include "host/cpu/weak_agent.h"
#include "host/runtime.h"

namespace protocol::normal_mode {

using namespace deep_ep;
using planted::expect;

enum class Fabric { kPeer, kWeak, kIbgda };

struct Setup {
    Fabric fabric;
    bool arena;        // outputs lie where peers see them
    u64 region_bytes;  // small ones make chunks of few rows
    int regions;
    nic::Options nic;
    bool recovers;  // the second lap breaks in the middle, and the ranks go on
};

constexpr u32 kRanks = 3, kTopk = 2, kExperts = 6, kHidden = 40, kRowBytes = 2 * kHidden, kLaps = 3, kBlocks = 2;
constexpr u32 kTokens[kRanks] = {9, 0, 14};

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

// What ranks have in common besides memory.
struct World {
    std::shared_ptr<host::Heap> heaps[kRanks];
    std::atomic<u32> arrived{0};

    void meet(u32 phase) {
        ++arrived;
        cpu::Executor::get().wait([&] { return arrived.load() >= phase * kRanks; }, "the other ranks");
    }
};

struct Rank {
    const u32 rank;
    host::Runtime& runtime;
    const Setup& setup;

    u8* output(std::vector<u8>& own, u64 bytes) {
        if (setup.arena && bytes != 0) return runtime.arena()->address(*runtime.arena()->allocate(bytes));
        own.assign(bytes + 64, 0xee);
        return reinterpret_cast<u8*>((reinterpret_cast<uintptr_t>(own.data()) + 63) & ~uintptr_t{63});
    }
    void release(u8* memory, u64 bytes) {
        if (setup.arena && bytes != 0) {
            runtime.arena()->release(static_cast<u64>(memory - runtime.heaps()[rank]->base()));
        }
    }
    void end(const std::shared_ptr<host::Call>& call) {
        runtime.wait(*call);
        const wire::Failure& failure = call->report->outcome.failure;
        expect(failure.mark == 0, std::string("failed: ") + wire::phase_name(static_cast<wire::Phase>(failure.phase)));
        runtime.retire(call);
    }

    void recover() {
        constexpr u64 kSecond = 1'000'000'000;
        expect(runtime.stop_all(kSecond), "kernels have not ended");
        expect(runtime.meet(0, 1, false, kSecond).result == host::Meeting::kMet, "first meeting");
        runtime.clear_words(2);
        expect(runtime.meet(0, 1, true, kSecond).result == host::Meeting::kMet, "second meeting");
        runtime.publish(2, 0);
    }

    void lap(u32 lap, bool breaks = false) {
        const u32 tokens = kTokens[rank];
        const host::Sizes sizes{tokens, kRowBytes, kTopk, kExperts};
        std::vector<u16> x(tokens * kHidden + 8);
        auto* rows = reinterpret_cast<u16*>((reinterpret_cast<uintptr_t>(x.data()) + 15) & ~uintptr_t{15});
        std::vector<i64> idx(tokens * kTopk);
        std::vector<float> weights(tokens * kTopk);
        for (u32 t = 0; t < tokens; ++t) {
            for (u32 h = 0; h < kHidden; ++h) rows[t * kHidden + h] = element(lap, rank, t, h);
            for (u32 k = 0; k < kTopk; ++k) {
                idx[t * kTopk + k] = expert(lap, rank, t, k);
                weights[t * kTopk + k] = static_cast<float>(t + k + 1);
            }
        }
        std::vector<i32> per_rank(kRanks), per_expert(kExperts);
        std::vector<u8> in_rank(tokens * kRanks);
        const auto address = [](auto& vector) { return reinterpret_cast<u64>(vector.data()); };
        runtime.wait_launch(
            runtime.layout(sizes, address(idx), address(per_rank), address(per_expert), address(in_rank), kBlocks));

        std::vector<i32> token_row(tokens * kRanks), row_token(kRanks * tokens), prefix(kRanks * kRanks),
            source_tokens(kRanks), rows_to_rank(kRanks);
        const Plan plan{token_row.data(), row_token.data(), prefix.data(), source_tokens.data()};
        auto call =
            runtime.notify(sizes, address(in_rank), address(per_expert), plan, address(rows_to_rank), 0, kBlocks);
        if (breaks) {
            if (rank == 0) runtime.abort(wire::kException);
            runtime.wait(*call);
            return;
        }
        runtime.wait_counts(*call);
        const u32 count = static_cast<u32>(call->report->outcome.total_rows);

        check_counts(lap, call->report->rows_per_expert);

        std::vector<u8> own_x, own_idx, own_weights, own_src;
        host::Tensors tensors;
        u8* recv_x = output(own_x, u64{count} * kRowBytes);
        u8* recv_idx = output(own_idx, count * kTopk * sizeof(i64));
        u8* recv_weights = output(own_weights, count * kTopk * sizeof(float));
        u8* recv_src = output(own_src, count * sizeof(i32));
        tensors.x = reinterpret_cast<u64>(rows);
        tensors.topk_idx = address(idx);
        tensors.topk_weights = address(weights);
        tensors.recv_x = reinterpret_cast<u64>(recv_x);
        tensors.recv_topk_idx = reinterpret_cast<u64>(recv_idx);
        tensors.recv_topk_weights = reinterpret_cast<u64>(recv_weights);
        tensors.recv_src_idx = reinterpret_cast<u64>(recv_src);
        runtime.dispatch(*call, sizes, tensors, plan, count, false, kBlocks);
        end(call);
        check_dispatch(lap, count, reinterpret_cast<u16*>(recv_x), reinterpret_cast<i64*>(recv_idx),
                       reinterpret_cast<float*>(recv_weights), reinterpret_cast<i32*>(recv_src));

        std::vector<u8> own_sum;
        own_sum.assign(u64{tokens} * kRowBytes + 64, 0xee);
        auto* sum = reinterpret_cast<u16*>((reinterpret_cast<uintptr_t>(own_sum.data()) + 63) & ~uintptr_t{63});
        host::Tensors back;
        back.x = reinterpret_cast<u64>(recv_x);
        back.recv_x = reinterpret_cast<u64>(sum);
        back.recv_src_idx = reinterpret_cast<u64>(recv_src);
        const host::Sizes combined{tokens, kRowBytes, 0, 0};
        call = runtime.notify_cached(wire::Kind::kCombine, combined, lap);
        runtime.combine(*call, combined, back, plan, count, true, kBlocks);
        end(call);
        for (u32 t = 0; t < tokens; ++t) {
            u32 copies = 0;
            for (u32 to = 0; to < kRanks; ++to) copies += goes(lap, rank, t, to);
            for (u32 h = 0; h < kHidden; ++h) {
                const u16 expected = bf16(copies * ((lap * 5 + rank * 3 + t * 7 + h) % 29));
                expect(sum[t * kHidden + h] == expected,
                       "rank " + std::to_string(rank) + ": sum of token " + std::to_string(t) + " is wrong");
            }
        }
        // Whoever owns these writes there again as soon as the calls have ended.
        std::fill(x.begin(), x.end(), u16{0xffff});
        release(recv_x, u64{count} * kRowBytes);
        release(recv_idx, count * kTopk * sizeof(i64));
        release(recv_weights, count * kTopk * sizeof(float));
        release(recv_src, count * sizeof(i32));
    }

    void check_counts(u32 lap, const i32* rows_per_expert) {
        for (u32 e = 0; e < kExperts / kRanks; ++e) {
            i32 rows = 0;
            for (u32 source = 0; source < kRanks; ++source) {
                for (u32 i = 0; i < kTokens[source] * kTopk; ++i) {
                    rows += expert(lap, source, i / kTopk, i % kTopk) == rank * (kExperts / kRanks) + e;
                }
            }
            expect(rows_per_expert[e] == rows,
                   "rank " + std::to_string(rank) + ": rows of expert " + std::to_string(e));
        }
    }

    void check_dispatch(u32 lap, u32 count, const u16* x, const i64* idx, const float* weights, const i32* src) {
        u32 row = 0;
        for (u32 source = 0; source < kRanks; ++source) {
            for (u32 t = 0; t < kTokens[source]; ++t) {
                if (!goes(lap, source, t, rank)) continue;
                const std::string what = "rank " + std::to_string(rank) + ", row " + std::to_string(row) + ": ";
                expect(row < count, what + "there are fewer");
                expect(src[row] == static_cast<i32>(t), what + "index at the source");
                for (u32 h = 0; h < kHidden; ++h) {
                    expect(x[row * kHidden + h] == element(lap, source, t, h), what + "x");
                }
                for (u32 k = 0; k < kTopk; ++k) {
                    const i64 local = static_cast<i64>(expert(lap, source, t, k)) - rank * (kExperts / kRanks);
                    const bool here = local >= 0 && local < kExperts / kRanks;
                    expect(idx[row * kTopk + k] == (here ? local : -1), what + "expert");
                    expect(weights[row * kTopk + k] == (here ? static_cast<float>(t + k + 1) : 0.0f), what + "weight");
                }
                ++row;
            }
        }
        expect(row == count, "rank " + std::to_string(rank) + ": " + std::to_string(count) + " rows, expected " +
                                 std::to_string(row));
    }
};

inline void run(uint64_t seed, const Setup& setup) {
    World world;
    planted::run_world(kRanks, seed, [&](int r) {
        const u32 rank = static_cast<u32>(r);
        host::BufferOptions options{};
        options.rank = r;
        options.ranks = kRanks;
        options.regions = setup.regions;
        options.region_bytes = setup.region_bytes;
        options.arena_bytes = setup.arena ? 1 << 16 : 0;
        options.timeout_ns = 1'000'000'000;
        options.rank_key = rank;
        options.calls = 2;
        options.poison = true;
        options.has_remote = setup.fabric != Fabric::kPeer;
        std::vector<bool> remote;
        for (u32 peer = 0; peer < kRanks; ++peer) {
            options.mapped.push_back(peer == rank || setup.fabric == Fabric::kPeer);
            remote.push_back(!options.mapped.back());
        }
        const wire::HeapLayout layout = host::Runtime::heap_layout(options);
        world.heaps[rank] = host::Heap::make_plain(layout.bytes());
        world.meet(1);
        std::vector<std::shared_ptr<host::Heap>> heaps(world.heaps, world.heaps + kRanks);
        std::vector<uint8_t*> bases;
        for (const auto& heap : heaps) bases.push_back(heap->base());
        auto memory = std::make_unique<host::CpuMemory>();
        const auto make_network = [&, shared = memory.get()]() -> std::unique_ptr<host::Network> {
            if (setup.fabric == Fabric::kWeak) return std::make_unique<host::WeakAgent>(r, bases);
            if (setup.fabric == Fabric::kPeer) return nullptr;
            const host::NicPlace place{r, bases, layout.bytes(), remote, *shared};
            return std::make_unique<host::NicAgents>(place, setup.nic);
        };
        auto launcher = std::make_unique<host::CpuLauncher>(r, heaps[rank]->base(), layout.regions_offset());
        auto network = make_network();
        const auto make_teller = [r](const uint64_t* claimed, std::vector<uint64_t*> words) {
            return std::make_unique<host::TellerAgent>(r, claimed, std::move(words),
                                                       std::make_unique<host::CpuMemory>());
        };
        host::Runtime runtime(options, heaps[rank], heaps, std::move(memory), std::move(launcher), std::move(network),
                              make_teller);
        runtime.on_renew_network(make_network);
        world.meet(2);
        Rank self{rank, runtime, setup};
        u32 phase = 3;
        for (u32 lap = 0; lap < kLaps; ++lap) {
            if (setup.recovers && lap == 1) {
                world.meet(phase++);  // nobody breaks off while a peer is still in what has ended here
                self.lap(lap, true);
                self.recover();
            }
            self.lap(lap);
        }
        world.meet(phase++);
        runtime.drain();
        world.meet(phase);
    });
}

}  // namespace protocol::normal_mode
