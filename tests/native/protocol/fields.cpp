#include "fields.h"

#include <cstring>
#include <functional>
#include <map>

#include "../program.h"
#include "sim/nic/send_queue.h"

namespace protocol::fields {

using namespace deep_ep;
namespace mlx5 = wire::mlx5;
using mlx5::Block;
using planted::expect;

constexpr u32 kNumber = 0x123, kBlocks = 16;
constexpr u64 kHere = 1ull << 40, kThere = 2ull << 40, kReturned = 3ull << 40, kHeapBytes = 4096;
constexpr u32 kHereKey = 3, kThereKey = 5, kReturnedKey = 8;

// One queue pair from rank 0 to rank 1, driven by hand.
struct Bench {
    alignas(64) Block ring[kBlocks];
    mlx5::DoorbellRecord record{};
    u64 doorbell = 0;
    mlx5::Cqe cqe;
    alignas(16) u8 here[kHeapBytes] = {};
    alignas(16) u8 there[kHeapBytes] = {};
    u64 returned = 0;
    nic::MemoryTable memory;
    nic::Options options;
    std::unique_ptr<nic::SendQueue> queue;
    u64 produced = 0;

    explicit Bench(nic::Options given = {}) : options(given) {
        options.blocks = kBlocks;
        std::memset(static_cast<void*>(ring), 0xcc, sizeof(ring));
        std::memset(static_cast<void*>(&cqe), 0xff, sizeof(cqe));
        memory.add(kHereKey, {0, kHere, kHeapBytes, here});
        memory.add(kThereKey, {1, kThere, kHeapBytes, there});
        memory.add(kReturnedKey, {0, kReturned, sizeof(u64), reinterpret_cast<u8*>(&returned)});
        const nic::SharedQueue shared{ring, &record, &doorbell, &cqe};
        queue = std::make_unique<nic::SendQueue>(
            nic::Connection{0, 1, kNumber, {}}, shared, memory, options, [](u32) { return 0u; }, nullptr);
    }
    Block write(u64 index, u64 source = 0, u64 target = 0, u32 bytes = 64) const {
        Block block{};
        block.control = mlx5::control(mlx5::kRdmaWrite, index, kNumber, mlx5::kUnitsOfWrite, true);
        block.remote = mlx5::remote_address(kThere + target, mlx5::big(kThereKey));
        block.data = mlx5::data(kHere + source, mlx5::big(kHereKey), bytes);
        return block;
    }
    Block add(u64 index, u64 target = 128) const {
        Block block{};
        block.control = mlx5::control(mlx5::kFetchAdd, index, kNumber, mlx5::kUnitsOfFetchAdd, true);
        block.remote = mlx5::remote_address(kThere + target, mlx5::big(kThereKey));
        block.atomic = mlx5::fetch_add(5);
        block.returned = mlx5::data(kReturned, mlx5::big(kReturnedKey), 8);
        return block;
    }
    void post(const Block& block) { ring[produced++ & (kBlocks - 1)] = block; }
    void ring_for(u64 count) {
        record.send = mlx5::send_counter(count);
        doorbell = mlx5::doorbell(kNumber, count);
    }
    void serve() {
        while (queue->has_work()) queue->step();
    }
};

// Returns the NIC's refusal, or nothing.
inline std::string refusal(Bench& bench) {
    try {
        bench.serve();
    } catch (const nic::Violation& violation) {
        return violation.what();
    }
    return "";
}

inline void check_refusals() {
    using Change = std::function<void(Block&)>;
    const std::map<std::string, std::pair<bool, Change>> changes = {
        // what is named -> an atomic?, the change
        {"index is 1, expected 0",
         {false, [](Block& b) { b.control = mlx5::control(mlx5::kRdmaWrite, 1, kNumber, 3, true); }}},
        {"has not been written", {false, [](Block& b) { std::memset(static_cast<void*>(&b), 0xcc, sizeof(b)); }}},
        {"queue pair number is 292",
         {false, [](Block& b) { b.control = mlx5::control(mlx5::kRdmaWrite, 0, kNumber + 1, 3, true); }}},
        {"units is 4, expected 3",
         {false, [](Block& b) { b.control = mlx5::control(mlx5::kRdmaWrite, 0, kNumber, 4, true); }}},
        {"units is 3, expected 4",
         {true, [](Block& b) { b.control = mlx5::control(mlx5::kFetchAdd, 0, kNumber, 3, true); }}},
        {"opcode is 9", {false, [](Block& b) { b.control.opcode = mlx5::big(9u); }}},
        {"opcode modifier is 9", {true, [](Block& b) { b.control.opcode |= mlx5::big(9u << 24); }}},
        {"fence and solicited bits", {false, [](Block& b) { b.control.flags |= mlx5::big(mlx5::kSolicited); }}},
        {"completion bits is 4", {false, [](Block& b) { b.control.flags = mlx5::big(4u); }}},
        {"immediate is 1", {false, [](Block& b) { b.control.immediate = mlx5::big(1u); }}},
        {"bytes is 0", {false, [](Block& b) { b.data.bytes = 0; }}},
        {"inline bytes is 12", {false, [](Block& b) { b.data.bytes = mlx5::big(12u | mlx5::kInline); }}},
        {"local key 77 is not registered", {false, [](Block& b) { b.data.key = mlx5::big(77u); }}},
        {"local key 5 belongs to rank 1", {false, [](Block& b) { b.data.key = mlx5::big(kThereKey); }}},
        {"local address: 64 bytes at 4064", {false, [](Block& b) { b.data.address = mlx5::big(kHere + 4064); }}},
        {"local address: 64 bytes at -16", {false, [](Block& b) { b.data.address = mlx5::big(kHere - 16); }}},
        {"remote key 3 belongs to rank 0", {false, [](Block& b) { b.remote.key = mlx5::big(kHereKey); }}},
        {"remote address: 64 bytes at 4096", {false, [](Block& b) { b.remote.address = mlx5::big(kThere + 4096); }}},
        {"reserved bits of the remote address", {false, [](Block& b) { b.remote.reserved = 1; }}},
        {"remote address modulo 8 is 4", {true, [](Block& b) { b.remote.address = mlx5::big(kThere + 4); }}},
        {"bytes of the old value is 4", {true, [](Block& b) { b.returned.bytes = mlx5::big(4u); }}},
        {"local key 5", {true, [](Block& b) { b.returned.key = mlx5::big(kThereKey); }}},
    };
    for (const auto& [named, change] : changes) {
        Bench bench;
        Block block = change.first ? bench.add(0) : bench.write(0);
        change.second(block);
        bench.post(block);
        bench.ring_for(1);
        const std::string said = refusal(bench);
        expect(said.find(named) != std::string::npos, "expected \"" + named + "\", the NIC said \"" + said + "\"");
        expect(said.find("rank 0, queue pair 291 to rank 1, request 0: ") == 0, said);
    }
}

inline void check_doorbells() {
    {
        Bench bench;  // more than the ring holds
        bench.ring_for(kBlocks + 1);
        expect(refusal(bench).find("overrun: 17 requests in a ring of 16") != std::string::npos, "overrun");
    }
    {
        Bench bench;
        bench.post(bench.write(0));
        bench.ring_for(1);
        bench.doorbell = mlx5::doorbell(kNumber + 1, 1);
        expect(refusal(bench).find("the doorbell is for queue pair 292") != std::string::npos, "queue of the doorbell");
    }
    {
        Bench bench;  // the record is older than the doorbell
        bench.post(bench.write(0));
        bench.doorbell = mlx5::doorbell(kNumber, 1);
        expect(refusal(bench).find("ahead of its record") != std::string::npos, "late record");
    }
    {
        Bench bench;  // a newer record is legal
        bench.post(bench.write(0));
        bench.post(bench.write(1));
        bench.ring_for(1);
        bench.record.send = mlx5::send_counter(2);
        expect(refusal(bench).empty() && mlx5::cqe_index(bench.cqe.tail) == 1, "newer record");
        bench.doorbell = mlx5::doorbell(kNumber, 2);
        expect(refusal(bench).empty(), "its own doorbell brings nothing new");
    }
    {
        Bench bench;  // a NIC ignores a record without its doorbell
        bench.post(bench.write(0));
        bench.record.send = mlx5::send_counter(1);
        expect(!bench.queue->has_work(), "no doorbell");
    }
}

// Data, atomics and completions, around the ring and beyond 16 bits of the index.
inline void check_execution() {
    Bench bench;
    constexpr u64 kRequests = 70'000;
    u64 adds = 0;
    for (u64 index = 0; index < kRequests; ++index) {
        if (index % 3 == 2) {
            bench.post(bench.add(index));
            ++adds;
        } else {
            for (u32 i = 0; i < 64; ++i) bench.here[i] = static_cast<u8>(index + i);
            bench.post(bench.write(index, 0, 1024));
        }
        bench.ring_for(index + 1);
        bench.serve();
        expect(mlx5::cqe_kind(bench.cqe.tail) == mlx5::kRequestDone, "completion");
        expect(mlx5::cqe_index(bench.cqe.tail) == (index & 0xffff), "index of the completion");
        if (index % 3 != 2) expect(std::memcmp(bench.here, bench.there + 1024, 64) == 0, "data");
    }
    expect(reinterpret_cast<u64*>(bench.there)[16] == 5 * adds && bench.returned == 5 * (adds - 1), "atomics");
    const nic::Counters counters = bench.queue->counters();
    expect(counters.atomics == adds && counters.writes == kRequests - adds && counters.bytes == 64 * counters.writes,
           "counters");
    expect(bench.queue->idle(kRequests) && !bench.queue->idle(kRequests + 1), "idle");

    Bench inlined;
    Block block = inlined.write(0, 0, 256);
    block.inlined = mlx5::inline_word(0x1122334455667788);
    inlined.post(block);
    inlined.ring_for(1);
    expect(refusal(inlined).empty(), "inline write");
    expect(reinterpret_cast<u64*>(inlined.there)[32] == 0x1122334455667788, "inline write's value");
}

inline void check_faults() {
    for (const u32 syndrome : {0u, 0x15u}) {
        nic::Options options;
        options.fault_rank = 0;
        options.fault_after = 2;
        options.fault_syndrome = syndrome;
        Bench bench(options);
        for (u64 index = 0; index < 4; ++index) bench.post(bench.add(index));
        bench.ring_for(4);
        bench.serve();
        expect(reinterpret_cast<u64*>(bench.there)[16] == 10, "two requests before the fault");
        const u32 tail = bench.cqe.tail;
        if (syndrome == 0) {
            expect(mlx5::cqe_kind(tail) == mlx5::kRequestDone && mlx5::cqe_index(tail) == 1, "silence");
        } else {
            expect(mlx5::cqe_kind(tail) == mlx5::kRequestError && mlx5::cqe_index(tail) == 2, "the error's request");
            expect(bench.cqe.syndrome == syndrome, "the syndrome");
        }
        expect(bench.queue->idle(4), "a failed queue pair does nothing any more");
    }
    Bench bench;
    bench.post(bench.add(0));
    bench.queue->fail(mlx5::kLocalOperation);
    bench.ring_for(1);
    bench.serve();
    expect(mlx5::cqe_kind(bench.cqe.tail) == mlx5::kRequestError && bench.cqe.syndrome == mlx5::kLocalOperation,
           "an error from outside");
    expect(reinterpret_cast<u64*>(bench.there)[16] == 0, "nothing is done after it");
}

void run(uint64_t) {
    check_refusals();
    check_doorbells();
    check_execution();
    check_faults();
}

}  // namespace protocol::fields
