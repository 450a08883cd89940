// Bulk copies, and the mbarriers that signal their completion.
#include "sim/executor/device_calls.h"
#include "sim/ptx/block.h"
#include "sim/ptx/handlers.h"
#include "sim/ptx/lane.h"
#include "sim/ptx/types.h"

namespace deep_ep::ptx {
namespace {

using Step = const Instruction&;
using Access = Lane::Access;

constexpr u64 kBulkUnit = 16;  // granularity of addresses and sizes
constexpr u64 kTryNs = 1'000'000;
constexpr u32 kMaxTries = 2'000;

Arrivals& barrier(Lane& lane, Step step, u32 operand) {
    const auto found = lane.block().barriers().find(lane.get<u64>(step.operands[operand]));
    if (found == lane.block().barriers().end()) lane.fail("there is no mbarrier at this address");
    return found->second;
}
u8* address_of(Lane& lane, Step step, u32 operand) {
    return lane.block().shared() + lane.get<u64>(step.operands[operand]);
}

bool can_end(const Arrivals& arrivals) {
    return arrivals.arrived >= arrivals.expected && arrivals.issued_bytes == arrivals.expected_bytes;
}

// If the current phase can end, performs its copies and ends it.
void settle(Lane& lane, Arrivals& arrivals) {
    if (!can_end(arrivals)) return;
    for (const BulkLoad& load : arrivals.loads) {
        std::memcpy(lane.block().shared() + load.target, load.source, load.bytes);
        std::memset(lane.block().written().data() + load.target, 1, load.bytes);
    }
    Arrivals next;
    next.expected = arrivals.expected;
    next.phase = arrivals.phase + 1;
    next.ended = std::move(arrivals.going_on);
    next.ended_issue = arrivals.issued;
    next.ended_at = std::move(arrivals.ends);
    arrivals = std::move(next);
}

u64 bulk_bytes(Lane& lane, Step step, u32 operand) {
    const u64 bytes = lane.get<u32>(step.operands[operand]);
    if (bytes % kBulkUnit != 0) lane.fail("a bulk copy of " + std::to_string(bytes) + " bytes, not a multiple of 16");
    return bytes;
}

void initialise(Lane& lane, Step step) {
    lane.reach(step.operands[0], Space::kShared, sizeof(u64), Access::kWrite);
    Arrivals made;
    made.expected = lane.get<u32>(step.operands[1]);
    lane.block().barriers()[lane.get<u64>(step.operands[0])] = made;
}

void arrive(Lane& lane, Step step) {
    lane.turn();
    Arrivals& arrivals = barrier(lane, step, 1);
    settle(lane, arrivals);
    if (arrivals.arrived == arrivals.expected) lane.fail("it arrives at an mbarrier whose phase has not ended");
    ++arrivals.arrived;
    if (LaneTime* const time = lane.time()) arrivals.ends.join(time->here());
    lane.note_barrier(address_of(lane, step, 1), true);
    if (lane.actor() != nullptr) lane.actor()->release(arrivals.going_on.all);
    arrivals.expected_bytes += lane.get<u32>(step.operands[2]);
}

// Waits for a while, since other threads of the block may still arrive. Nothing else can end a phase here, so a phase
// that has not ended after many such waits never will.
void try_wait(Lane& lane, Step step) {
    lane.turn();
    Arrivals& arrivals = barrier(lane, step, 1);
    const u32 parity = lane.get<u32>(step.operands[2]) % 2;
    if (arrivals.phase % 2 == parity && !can_end(arrivals)) {
        const auto may_have_ended = [&] { return arrivals.phase % 2 != parity || can_end(arrivals); };
        cpu::wait_until(may_have_ended, "mbarrier", cpu::now_ns() + kTryNs, lane.site().file, lane.site().line);
    }
    settle(lane, arrivals);
    const bool ended = arrivals.phase % 2 != parity;
    if (!ended && ++arrivals.tries == kMaxTries) lane.fail("it waits for a phase of an mbarrier that never ends");
    lane.note_barrier(address_of(lane, step, 1), false);
    if (ended) {
        if (Actor* const actor = lane.actor(); actor != nullptr) {
            actor->clock.join(arrivals.ended.all);
            actor->copies.join(arrivals.ended.copies);
        }
        lane.count_wait(arrivals.ended_issue);
        if (LaneTime* const time = lane.time()) time->join(arrivals.ended_at, machine::kArrival);
    }
    lane.set<bool>(step.operands[0], ended);
}

// [target], [source], bytes, [barrier]
void load(Lane& lane, Step step) {
    const u64 bytes = bulk_bytes(lane, step, 2), target = lane.get<u64>(step.operands[0]);
    Arrivals& arrivals = barrier(lane, step, 3);
    if (bytes == 0) return;
    lane.locate(step.operands[0], Space::kShared, kBulkUnit, Access::kWrite);
    std::vector<u8>& written = lane.block().written();
    if (bytes > written.size() - target) lane.fail("a bulk copy beyond the end of shared memory");
    // The target is unwritten until a thread has waited for the copy.
    std::memset(written.data() + target, 0, bytes);
    const u8* const source = lane.locate(step.operands[1], Space::kGlobal, kBulkUnit, Access::kRead);
    if (Actor* const actor = lane.actor(); actor != nullptr) {
        const Epoch moment = actor->issue(Copies::kLoad);
        lane.note_copy(lane.block().shared() + target, bytes, true, moment, actor->copies.shared);
        lane.note_copy(source, bytes, false, moment, actor->copies.global);
        // The copy reports its bytes to the mbarrier, so like an arrival it must be ordered after its initialization.
        lane.note_copy(address_of(lane, step, 3), sizeof(u64), true, moment, actor->copies.shared, Scope::kBlock);
        Arrivals::Known& known = arrivals.going_on;
        known.all.join(actor->copies.global);
        known.all.join(actor->copies.shared);
        known.all.set(moment.actor, moment.time);
        known.copies.join(actor->copies);
        known.copies.set(moment.actor, moment.time);
    }
    arrivals.issued = lane.count_bulk_load(source, bytes, arrivals.ends);
    arrivals.loads.push_back({target, source, bytes});
    arrivals.issued_bytes += bytes;
}

// [target], [source], bytes
void store(Lane& lane, Step step) {
    const u64 bytes = bulk_bytes(lane, step, 2), source = lane.get<u64>(step.operands[1]);
    if (bytes == 0) return;
    lane.locate(step.operands[1], Space::kShared, kBulkUnit, Access::kRead);
    const std::vector<u8>& written = lane.block().written();
    if (bytes > written.size() - source || std::memchr(written.data() + source, 0, bytes) != nullptr) {
        lane.fail("a bulk copy of shared memory that was not written");
    }
    u8* const target = lane.locate(step.operands[0], Space::kGlobal, kBulkUnit, Access::kWrite);
    lane.count_bulk_store(target, bytes);
    IssuedStore issued{};
    if (Actor* const actor = lane.actor(); actor != nullptr) {
        issued = {actor->copies, actor->issue(Copies::kRead), actor->issue(Copies::kWrite)};
    }
    lane.stores().add(target, lane.block().shared() + source, bytes, std::move(issued));
}

void commit(Lane& lane, Step) {
    lane.stores().commit();
    if (LaneTime* const time = lane.time()) time->commit();
}

// Accesses of stores are noted when a thread waits for them, with the clock that the thread's copies had at issue.
void read(Lane& lane, const BulkStores::Store& store) {
    lane.note_copy(store.source, store.bytes, false, store.issued.reads, store.issued.after.shared);
    if (lane.actor() != nullptr) lane.actor()->complete(store.issued.reads);
}
void write(Lane& lane, const BulkStores::Store& store) {
    lane.note_copy(store.target, store.bytes, true, store.issued.writes, store.issued.after.global);
    if (lane.actor() != nullptr) lane.actor()->complete(store.issued.writes);
}
void wait_read(Lane& lane, Step step) {
    const u64 pending = lane.get<u64>(step.operands[0]);
    lane.stores().read(pending, [&](const auto& store) { read(lane, store); });
    if (LaneTime* const time = lane.time()) time->wait_group(pending, false);
}
void wait(Lane& lane, Step step) {
    const u64 pending = lane.get<u64>(step.operands[0]);
    if (LaneTime* const time = lane.time()) time->wait_group(pending, true);
    lane.stores().complete(
        pending, [&](const auto& store) { read(lane, store); }, [&](const auto& store) { write(lane, store); });
}
template <bool kGlobal, bool kShared>
void fence(Lane& lane, Step) {
    lane.fence_copies(kGlobal, kShared);
}

const Handlers& bulk_handlers() {
    static const Handlers all{
        {"mbarrier.init.shared::cta.b64", initialise},
        {"mbarrier.arrive.expect_tx.shared::cta.b64", arrive},
        {"mbarrier.try_wait.parity.shared::cta.b64", try_wait},
        {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", load},
        {"cp.async.bulk.global.shared::cta.bulk_group", store},
        {"cp.async.bulk.commit_group", commit},
        {"cp.async.bulk.wait_group.read", wait_read},
        {"cp.async.bulk.wait_group", wait},
        {"fence.proxy.async", fence<true, true>},
        {"fence.proxy.async.global", fence<true, false>},
        {"fence.proxy.async.shared::cta", fence<false, true>},
    };
    return all;
}

}  // namespace

Handler find_bulk(std::string_view opcode) { return look_up(bulk_handlers(), opcode); }

}  // namespace deep_ep::ptx
