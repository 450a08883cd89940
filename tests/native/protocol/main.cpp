// protocol SCENARIO SEED: runs a part of the protocol without Python. Exit code 0: success; 3: wrong values; 4: a
// rule of the SIMT machine or of the NIC was broken; 5: deadlock; 66: ThreadSanitizer's report.
#include <map>

#include "apart.h"
#include "barriers.h"
#include "bounds.h"
#include "expanded.h"
#include "failing.h"
#include "fields.h"
#include "low_latency.h"
#include "machines.h"
#include "masks.h"
#include "near_part.h"
#include "normal_mode.h"
#include "posters.h"
#include "quiet.h"
#include "replays.h"
#include "sender.h"
#include "sharing.h"
#include "two_buffers.h"
#include "two_hop_failing.h"
#include "two_hops.h"

int main(int argc, char** argv) {
    using namespace protocol;
    using deep_ep::u64;
    deep_ep::nic::Options slow;
    slow.blocks = 16;
    slow.queues_per_peer = 2;
    slow.mtu = 32;
    slow.max_bytes = 48;
    slow.max_delay = 4;
    slow.relaxed = true;
    slow.traced = true;
    deep_ep::nic::Options longer = slow;  // requests, so that a put of many rows fits into a ring
    longer.mtu = 128;
    longer.max_bytes = 1024;
    deep_ep::nic::Options tight = slow;  // two puts of the posters fill a ring
    tight.blocks = 4;
    deep_ep::nic::Options split;
    split.blocks = 32;
    split.chunk_log2 = 12;
    deep_ep::nic::Options within = split;  // heaps begin within their first chunks
    within.key_offset = 1072;
    deep_ep::nic::Options fast;
    fast.blocks = 64;
    constexpr u64 kTight = 4096, kAmple = 1 << 16;
    const auto normal = [&](const char* fabric, bool arena, u64 region_bytes, int regions = 2, bool recovers = false) {
        return [=](uint64_t seed) { normal_mode::run(seed, {fabric, arena, region_bytes, regions, slow}, recovers); };
    };
    const auto failing = [&](const char* fabric, bool arena, u64 region_bytes, failing::Kind kind) {
        return [=](uint64_t seed) { failing::run<Batch>(seed, {fabric, arena, region_bytes, 2, slow}, kind); };
    };
    const auto low_latency = [&](const char* fabric) {
        return [=](uint64_t seed) { low_latency_mode::run(seed, {fabric, true, kTight, 2, longer}); };
    };
    const auto once_per_node = [&](const char* fabric) {
        return [=](uint64_t seed) { low_latency_mode::run_nodes(seed, {fabric, true, kTight, 2, longer}); };
    };
    const auto masks = [&](const char* fabric) {
        return [=](uint64_t seed) { masks::run(seed, {fabric, true, kTight, 2, longer}); };
    };
    const auto two_hops = [&](const char* fabric, int regions, const Nodes& nodes) {
        return [=](uint64_t seed) { two_hop_mode::run(seed, {fabric, true, kAmple, regions, longer, false, nodes}); };
    };
    const std::map<std::string, std::function<void(uint64_t)>> scenarios = {
        {"peer", normal("peer", true, kAmple)},
        {"peer rounds", normal("peer", false, kTight)},
        // With two, an operation cannot begin before all ranks have finished the one before the last anyway.
        {"one region", normal("peer", false, kTight, 1)},
        {"weak", normal("weak", false, 4 * kTight)},
        {"ibgda", normal("ibgda", true, 4 * kTight)},
        {"apart", [&](uint64_t seed) { apart::run(seed, {"peer", true, kAmple, 2, slow}); }},
        {"recover", normal("peer", false, kTight, 2, true)},
        {"proxy", normal("proxy", true, 4 * kTight)},
        {"recover proxy", normal("proxy", true, 4 * kTight, 2, true)},
        {"recover ibgda", normal("ibgda", true, 4 * kTight, 2, true)},
        {"failing", failing("peer", true, kAmple, {false, false, kRanks - 1})},
        {"failing, watched", failing("peer", true, kAmple, {false, true, kRanks - 1})},
        {"failing, ordered", failing("peer", true, kAmple, {true, false, kRanks - 1})},
        {"failing rounds", failing("peer", false, kTight, {false, false, kRanks - 1})},
        {"failing weak", failing("weak", false, 2 * kTight, {false, false, kRanks - 1})},
        {"failing proxy", failing("proxy", true, 2 * kTight, {false, false, kRanks - 1})},
        {"failing ibgda", failing("ibgda", true, 2 * kTight, {false, false, kRanks - 1})},
        {"replays", [&](uint64_t seed) { replays::run(seed, {"peer", true, kAmple, 2, slow}); }},
        {"replays ibgda", [&](uint64_t seed) { replays::run(seed, {"ibgda", true, 4 * kTight, 2, slow}); }},
        {"replays proxy", [&](uint64_t seed) { replays::run(seed, {"proxy", true, 4 * kTight, 2, slow}); }},
        {"two buffers", [&](uint64_t seed) { two_buffers::run(seed, {"peer", true, kAmple, 2, slow}); }},
        {"two buffers weak", [&](uint64_t seed) { two_buffers::run(seed, {"weak", false, kAmple, 2, slow}); }},
        {"expanded", [&](uint64_t seed) { expanded::run(seed, {"peer", true, kAmple, 2, slow}); }},
        {"expanded rounds", [&](uint64_t seed) { expanded::run(seed, {"peer", false, 2 * kTight, 2, slow}); }},
        {"expanded ibgda", [&](uint64_t seed) { expanded::run(seed, {"ibgda", true, 4 * kTight, 2, slow}); }},
        {"bounds", [&](uint64_t seed) { bounds::run(seed, {"peer", true, kTight, 2, slow}); }},
        {"bounds rounds", [&](uint64_t seed) { bounds::run(seed, {"peer", false, kTight, 2, slow}); }},
        {"bounds weak", [&](uint64_t seed) { bounds::run(seed, {"weak", false, 2 * kTight, 2, slow}); }},
        {"bounds ibgda", [&](uint64_t seed) { bounds::run(seed, {"ibgda", true, 2 * kTight, 2, slow}); }},
        {"low latency", low_latency("peer")},
        {"low latency weak", low_latency("weak")},
        {"low latency ibgda", low_latency("ibgda")},
        {"low latency proxy", low_latency("proxy")},
        {"low latency mixed", low_latency("mixed")},
        {"once per node weak", once_per_node("weak")},
        {"once per node ibgda", once_per_node("ibgda")},
        {"once per node proxy", once_per_node("proxy")},
        {"masks", masks("peer")},
        {"masks weak", masks("weak")},
        {"masks ibgda", masks("ibgda")},
        {"masks proxy", masks("proxy")},
        {"masks mixed", masks("mixed")},
        {"two hops peer", two_hops("peer", 1, {6, 3, false, 1000})},
        {"two hops weak", two_hops("weak", 1, {4, 2, false, 1000})},
        // Chunks have more rows than a block has warps.
        {"two hops wide", two_hops("weak", 1, {4, 2, false, kAmple})},
        {"two hops ibgda", two_hops("ibgda", 2, {6, 2, true, 1800})},
        {"two hops proxy", two_hops("proxy", 2, {4, 2, true, 1000})},
        {"two hops without", two_hops("ibgda", 2, {8, 4, true, 1000, 1 << 1 | 1 << 6})},
        // A rank whose own position is another's in one node, and which has the position of a third in its own.
        {"two hops crossed", two_hops("ibgda", 2, {8, 4, true, 1000, 1 << 3 | 1 << 4})},
        {"two hops failing",
         [&](uint64_t seed) {
             failing::run<two_hop_mode::Batch>(seed, {"ibgda", true, kAmple, 2, longer, false, {4, 2, true, kAmple}},
                                               {false, false, 0, 32});
         }},
        {"fields", fields::run},
        {"barriers", barriers::run},
        {"near part", near_part::run},
        {"machines", machines::run},
        {"sender", sender::run},
        // More queue pairs than threads in a block, in the exact build too.
        {"quiet", [](uint64_t seed) { quiet::run(seed, 64, 4, 3); }},
        {"posters", [&](uint64_t seed) { posters::run(seed, "ibgda", 2, 4, 6, slow); }},
        {"posters proxy", [&](uint64_t seed) { posters::run(seed, "proxy", 2, 4, 6, tight); }},
        {"sharing", [&](uint64_t seed) { sharing::run(seed, 4, false, slow); }},
        {"sharing, giving up", [&](uint64_t seed) { sharing::run(seed, 4, true, slow); }},
        {"sharing, doorbells", [&](uint64_t seed) { sharing::run_left(seed, slow); }},
        // Requests end where the keys of their memory do.
        {"keys", [&](uint64_t seed) { posters::run(seed, "ibgda", 2, 4, 12, split); }},
        {"keys, offset", [&](uint64_t seed) { posters::run(seed, "ibgda", 2, 4, 12, within); }},
        // 1.5 * 2^16 WQEBBs: the index of the queue pair wraps.
        {"wrap", [&](uint64_t seed) { posters::run(seed, "ibgda", 2, 4, 4096, fast); }},
    };
    if (argc != 3 || scenarios.count(argv[1]) == 0) return std::fprintf(stderr, "protocol SCENARIO SEED\n"), 2;
    try {
        scenarios.at(argv[1])(std::strtoull(argv[2], nullptr, 10));
    } catch (const planted::WrongValue& wrong) {
        return std::fprintf(stderr, "wrong value: %s\n", wrong.message.c_str()), 3;
    } catch (const deep_ep::cpu::SimtError& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 4;
    } catch (const deep_ep::cpu::DeadlockError& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 5;
    }
    return 0;
}
