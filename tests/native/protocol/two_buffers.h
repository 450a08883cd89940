// Two Buffers of the same ranks on one stream: an operation queued on one of them works on the results of an operation
// on the other. If that fails, so does this, although nothing is wrong with its own Buffer (P15).
#pragma once

#include "failing.h"

namespace protocol::two_buffers {

inline void run(uint64_t seed, const Setup& setup) {
    const u64 timeout = 10 * kSecond;
    Draw draw(seed);
    const u32 late = draw.below(kRanks);
    const u64 late_ns = draw.below(2) == 0 ? timeout : timeout * 3 / 2;
    World first, second;
    failing::Ends ends;
    planted::run_world(kRanks, seed, [&](int r) {
        const u32 rank = static_cast<u32>(r);
        cpu::Executor& executor = cpu::Executor::get();
        Parts parts;
        parts.timeout_ns = timeout;
        Buffer one(first, rank, setup, std::move(parts));
        parts = {};
        parts.timeout_ns = timeout;
        parts.launcher = [&](std::shared_ptr<host::CpuLauncher>) { return one.stream; };
        Buffer other(second, rank, setup, std::move(parts));
        Batch batch(one, 0), behind(other, 1);
        for (auto [buffer, rows] : {std::pair{&one, &batch}, {&other, &behind}}) {
            auto call = rows->notify();
            rows->dispatch(*call);
            end_well(*buffer, call);
        }
        one.meet(first);
        if (rank == late) executor.wait([] { return false; }, "being late", executor.now_ns() + late_ns);

        Output sums = batch.make_sums(), sums_behind = behind.make_sums();
        const std::vector<failing::Rows::Row> of = failing::rows_of(behind);
        const auto cause = batch.combine(one, batch.recv_x, sums);
        failing::launch_write_over(one, {behind.recv_x.as<u16>(), of.data(), behind.count, kHidden}, 1, *cause,
                                   ends.of[0], false);
        const auto call = behind.combine(other, behind.recv_x, sums_behind);
        executor.synchronize(r, one.stream->stream());
        one.meet(first);
        if (cause->reason() == 0) batch.check_echo(sums);
        if (call->reason() == 0) {
            behind.check_sums(sums_behind,
                              [&](u32 holder, u32 token, u32 h) { return failing::value(1, holder, rank, token, h); });
        }
        expect(cause->reason() == 0 || call->reason() != 0,
               behind.whose() + "an operation on the results of a failed one succeeded");
        batch.check_guards();
        behind.check_guards();
        one.meet(first);
    });
}

}  // namespace protocol::two_buffers
